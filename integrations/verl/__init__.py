"""verl's FSDP engines with optimizer state wherever `offload` keeps it: four lines of verl's own configuration.

    actor_rollout_ref.model.external_lib=offload.integrations.verl.enabled
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.optim.optimizer_impl=offload
    actor_rollout_ref.actor.optim.override_optimizer_config={offload:{host_memory:0,paths:[/mnt/nvme0/offload]}}

Where verl moves an optimizer's state off the GPU, ours is parked: state leaves the GPU for host memory and paths, and
memory goes back to the system until the optimizer is used again. Checkpoints have a folder `optimizer` for its state.
Other optimizers stay as they are.
"""

from offload.integrations.verl.switch import disable, enable

__all__ = ["disable", "enable"]
