"""Accelerate with optimizer state wherever `offload` keeps it.

    from offload.integrations.accelerate import enable
    model, optimizer = accelerator.prepare(model, offload.AdamW(model.named_parameters(), ...))
    optimizer = enable(accelerator, optimizer)

`accelerator.clip_grad_norm_` then clips in the update itself, `save_state` and `load_state` leave the state where it
lives, and all of our optimizer's own methods can be called on the prepared one.
"""

from offload.integrations.accelerate.prepared import enable

__all__ = ["enable"]
