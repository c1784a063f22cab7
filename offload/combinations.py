"""Settings, calls and frameworks that exclude each other: a row for each combination, with what users are told.

The code that first knows of a combination refuses it by its row, before any file is touched. Values that are wrong by
themselves are refused where they are checked. docs/limits.md shows this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from offload.errors import ConfigError

CONFIG, MADE = ("when the config is made",), ("when the optimizer is made",)
FORWARD, BACKWARD = ("forward", "both"), ("backward", "both")
"""Values of `overlap` that hide steps in forward, and those that hide steps in backward."""
ATTACHED, CALLED = ("when the framework begins",), ("when it is called",)
"""With `CONFIG` and `MADE`: values of `Row.known`, in the words of docs/limits.md."""


@dataclass(frozen=True, slots=True)
class Row:
    """Two things that exclude each other.

    Attributes:
        known: The moments at which the combination is refused: several if several places find it out.
        one: The first thing, in the words of docs/limits.md.
        other: The second thing, which the first is not combined with.
        advice: What users are told to do; names in braces are replaced by the `words` of `refuse`.
        values: Where `check` is used: the values of the setting that it refuses.
    """

    known: tuple[str, ...]
    one: str
    other: str
    advice: str
    values: tuple[str, ...] = ()

    def refuse(self, field: str, value: object, **words: object) -> NoReturn:
        """Refuse the combination.

        Args:
            field: The setting or argument that the error names.
            value: Its value.
            words: What replaces the names in braces in the advice.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(field, value, self.advice.format(**words))

    def names(self, value: object) -> bool:
        """Return whether a setting's value is among `values`, which `check` refuses."""
        return value in self.values

    def check(self, field: str, value: object, **words: object) -> None:
        """Refuse the combination if `value` is among `values`; see `refuse`."""
        if self.names(value):
            self.refuse(field, value, **words)


# fmt: off
# Settings alone
WITHOUT_PATHS = Row(CONFIG + CALLED, "`gradient_memory`; `activations_on_paths`", "no `paths`",
    "give paths: {what} that do not fit leave for them")
MIRRORED_COPIES = Row(CONFIG, "`mirror`", "no `paths`, or `checkpoints_kept` 0",
    "give paths, and keep at least 1 checkpoint: what is saved without is a copy already")
NONE_KEPT = Row(CALLED + ATTACHED, "`checkpoints_kept` 0, with `paths`",
    '`save_checkpoint` without `copy=True`; `commit_on_sigterm`; `"layout": "in_place"` under DeepSpeed',
    'keep at least 1, or save with copy=True (under DeepSpeed with the layout "stock")')
UPDATES_IN_BACKWARD = Row(CONFIG, '`overlap` "backward", "both"', "`gradient_memory`",
    'use "off", "forward" or "auto" with gradient_memory: updates during backward keep new weights in memory, as '
    'many bytes as the gradients', values=BACKWARD)
BORROWED = Row(CONFIG + CALLED, '`gpu_memory` "borrow"',
    '`overlap` "forward", "both"; `overlap_forward`; `Engine.step` with `pending`',
    'use "auto" or a size where steps go on in forward: what is borrowed goes back before that')
NO_TURNS = Row(CONFIG, '`path_lock` "on", a number', '`io_backend` "asyncio"',
    'use "off": asyncio takes no turns')
ENGINE_SHARDS = Row(MADE, "`shard`", "`Engine`",
    "leave it out: an engine's parameters say which pieces they are, as those of DeepSpeed's ZeRO do")

# Who updates
WEIGHTS_ON_CPU = Row(MADE, '`placement` "gpu", a share; `gpu_memory` "borrow", a size', "weights on the CPU",
    "use {least}: the weights are not on a GPU")
SLOTS_ON_CPU = Row(MADE, "`keep_grads` false", "weights on the CPU",
    "use true: gradients that are not on a GPU lie in their slots anyway")
GRADIENTS_ON_PATHS = Row(MADE, '`placement` "gpu", a share; `gpu_memory` "borrow", a size',
    "`gradient_memory` with weights on a GPU",
    "use {least}: with gradient_memory gradients lie in host memory and on the paths, and the CPU updates")
UPDATED_BY_CPU = Row(MADE, '`placement` "gpu", a share; `gpu_memory` "borrow", a size',
    "rules of whole parameters: `Muon`, `wrap`",
    "use {least}: {rule} is updated by the CPU")
TYPES_OF_ITS_OWN = Row(MADE, '`state_format`, but for "exact"', "`wrap`",
    'use "exact": {rule} keeps its state in types of its own')
PIECES_ROUNDED = Row(MADE, '`state_format`, but for "exact"', "weights that are cut otherwise than along their rows",
    'use "exact": a piece of {name} is no run of it, as it is not cut along its rows')

# Gradients that leave memory, or a GPU
GRADIENTS_BOUND = Row(CALLED, "gradients that are bound where they lie, by `Engine`", "`gradient_memory`",
    "say `arrived` of each gradient, or leave gradient_memory out")
GRADIENTS_READ = Row(CALLED, "`gradient_memory`", "reading or changing gradients after backward, by `Engine`",
    "leave it out where gradients are read or changed after backward: they lie on the paths")
CAPTURED = Row(CALLED, "`step`, `clip_grad_norm_`, `zero_grad`; backward with `keep_grads` false",
    "capture of a CUDA graph",
    "leave step, clip_grad_norm_, zero_grad and, with keep_grads=False, backward out of the capture: a replay would "
    "not repeat what they do")
GRAPHS_ACCUMULATE = Row(CALLED, "several backward passes a step in a CUDA graph", "`keep_grads` false",
    "with CUDA graphs, take one backward pass a step, or keep_grads=True")
REDUCED_LATER = Row(MADE, "`gradient_memory`; `keep_grads` false", "several ranks, but for FSDP2",
    "{instead}: {ranks} processes reduce gradients after they have arrived, but for those of FSDP2")
MADE_ALONE = Row(CALLED, "`gradient_memory`; `keep_grads` false; `shard`",
    "an optimizer that was made before `init_process_group`",
    "make the optimizer after init_process_group: it knows nothing of {ranks} processes")
CLIPPED_APART = Row(CALLED, "`gradient_memory`; `keep_grads` false",
    "an accelerator of Hugging Face, or Lightning, that clips some of the parameters, by another norm, or by value",
    "clip all together, by their L2 norm, what leaves during backward; or keep gradients in memory")

# Weights that are cut, or gathered by others
SHARDED_TWICE = Row(MADE, "`shard`", "`DTensor`s",
    "leave it out: {name} is a DTensor, which is sharded already")
REPLICAS_OF_SOME = Row(MADE, "`shard`", "ranks with other weights, as where DDP has a process group of some ranks",
    "leave it out: rank {other} has other weights than rank {rank}, and rows are exchanged among all ranks")
WHOLE_PARAMETERS = Row(MADE, "`shard`; `DTensor`s; pieces of parameters",
    "rules of whole parameters: `wrap`; `Engine` with any",
    "{rule} updates whole parameters: give them unsharded")
DEALT_GRADIENTS = Row(MADE, "`gradient_memory`", "`Muon` of sharded matrices",
    "leave it out: gradients of sharded matrices go to the ranks that these were dealt to")
DEALT_FORWARD = Row(MADE + CALLED, '`overlap` "forward", "both"; `overlap_forward`', "`Muon` of sharded matrices",
    'use overlap "off" or "backward": shards of matrices come back from the ranks that update them', values=FORWARD)
DEALT_STATE = Row(CALLED, "`state_dict`, `optimizer.state`",
    "`Muon` on several ranks, with sharded matrices or `shard`",
    "save_checkpoint instead: a whole matrix and its state lie on the rank that it was dealt to")
FSDP1_BACKWARD = Row(MADE, '`overlap` "backward", "both"', "FSDP1 on several ranks",
    'use "off": no hook sees gradients of FSDP1 on several ranks', values=BACKWARD)
FSDP1_FORWARD = Row(CALLED, "`overlap_forward`", "FSDP1",
    "have whole weights on each rank, or DTensors: FSDP1 gathers before a module's turn")
FSDP1_CLIPS = Row(CALLED, "`clip_grad_norm_`", "FSDP1 on several ranks",
    "use the FSDP1 module's own clip_grad_norm_, and torch's ShardedGradScaler: this rank has a part")
FSDP1_MODEL = Row(CALLED, "`model` of a checkpoint", "FSDP1",
    "use fully_shard, or give what is needed as extra")

# Weights in host memory, or in a file
HOST_ALONE = Row(CALLED, "`weights_in_host_memory`", "several processes",
    "shard it over them: fully_shard(model, offload_policy=CPUOffloadPolicy()); this call is for one process")
HOST_TAKEN = Row(CALLED, "`weights_in_host_memory`", "a model that FSDP, DDP, DeepSpeed or `weights_in_file` has",
    "call weights_in_host_memory once, before anything else takes the model: {taker} has")
HOST_LATE = Row(CALLED, "`weights_in_host_memory`", "an optimizer of the model",
    "make the optimizer behind it: {optimizer} has parameters that are not the model's any more then")
FILE_LATE = Row(CALLED, "`weights_in_file`", "an optimizer of the model",
    "make the optimizer behind it: {optimizer} has the weights where they were")

# Models that a step has to know
NO_MODEL = Row(CALLED, '`overlap` "forward", "both"', "`step` without `overlap_forward`",
    "call optimizer.overlap_forward(model) before the first step: its modules wait for weights", values=FORWARD)
FILE_PINNED = Row(CALLED, "`weights_in_file`", "FSDP2 that pins shards",
    "use fully_shard(..., offload_policy=CPUOffloadPolicy(pin_memory=False)): pinned memory is no file's")
IMAGES_OF_MAPPED = Row(MADE + ATTACHED, '`overlap` "backward", "both"',
    '`weights_in_file`; ZeRO-3\'s `offload_param` on `"nvme"`',
    'use "off", "forward" or "auto" with weights in a file: updates during backward keep new weights in memory',
    values=BACKWARD)
SCRIPTED = Row(CALLED, "`overlap_forward`", "models with a `ScriptModule`",
    "give a model that is not scripted: that runs no hooks")
COPIED_GRADIENTS = Row(CALLED, '`overlap` "backward", "both"',
    "FSDP2 with `CPUOffloadPolicy` and a GPU, without `overlap_backward`",
    "call optimizer.overlap_backward(model) before the first step: FSDP2 copies gradients", values=BACKWARD)
NOT_REDUCED = Row(CALLED, "`overlap_backward` with `comm_hook`", "one process, or gradients that leave",
    "leave it out: it is for DDP on several ranks, with keep_grads=True and no gradient_memory")
HOOKED = Row(CALLED, "`overlap_backward`", "a communication hook that DDP has already",
    "give overlap_backward its communication hook, in the place of register_comm_hook: it has one")
DIVIDED_BY_OTHERS = Row(CALLED, "`overlap_backward`", "`join` with `divide_by_initial_world_size=False`",
    "leave divide_by_initial_world_size at True: the hook of overlap_backward divides by all ranks")
COMPILED_REDUCTIONS = Row(CALLED, "`overlap_backward`", 'DDP that is compiled with `optimize_ddp = "python_reducer"`',
    'leave optimize_ddp = "ddp_optimizer"')

# Frameworks
BY_DEEPSPEED = Row(ATTACHED, "sharding by DeepSpeed or FSDP",
    "integrations of Lightning, and of Accelerate, but for its FSDP2",
    "use one device, DDP, or FSDP2 under Accelerate; for DeepSpeed see offload.integrations.deepspeed")
WRITES_BEHIND = Row(ATTACHED, "integration of Lightning", "its `AsyncCheckpointIO`, or another plugin that wraps one",
    "give the plugin that it wraps, or none: older state is deleted, and a mirror begins, once a save has returned")
GATHERED_TO_SAVE = Row(ATTACHED, "`FULL_STATE_DICT` of Accelerate's FSDP2", "`cpu_offload` in one process",
    'use "SHARDED_STATE_DICT": Accelerate would bring all weights to the device to save them')
DEEPSPEED_TRAINER = Row(ATTACHED, '`optim` "offload_..." of a Hugging Face `Trainer`', "its `deepspeed`",
    'leave it out, give DeepSpeed\'s config a "multi_tier_offload" object, and run the script by `python -m '
    'offload.integrations.deepspeed`, without which DeepSpeed ignores it')
TWO_SAVES = Row(ATTACHED, "`commit_on_sigterm` of a Hugging Face `Trainer`", "its `enable_jit_checkpoint`",
    "leave one of them out: both save at a SIGTERM")
FSDP_TRAINER = Row(ATTACHED, '`optim` "offload_..." of a Hugging Face `Trainer`',
    "its `fsdp`, but for FSDP2 with `cpu_offload` in one process",
    'use fsdp=True with fsdp_config={{"cpu_offload": True}} in one process, or leave fsdp out')
OTHER_PARALLELISM = Row(ATTACHED, "DeepSpeed's MoE layers, `PipelineModule`, model and tensor parallelism",
    "`multi_tier_offload`",
    "leave multi_tier_offload out: only data parallelism is supported")
DEEPSPEED_KEEPS = Row(ATTACHED, "`keep_grads`", "DeepSpeed",
    "leave it out: DeepSpeed decides how long gradients stay")
DEEPSPEED_DTYPE = Row(ATTACHED, "`gradient_dtype`", "DeepSpeed",
    'leave it out and write "data_types": {{"grad_accum_dtype": "fp32"}}')
DEEPSPEED_FORWARD = Row(CALLED, "`overlap_forward`", "DeepSpeed",
    'leave it out, and write "overlap": "forward" in the config: weights are gathered in forward then')
SWAPPED_BY_DEEPSPEED = Row(ATTACHED, "weights that DeepSpeed's own swapper has on NVMe since `zero.Init`",
    "`multi_tier_offload`",
    'give zero.Init a config with a "multi_tier_offload" object too, and switch the backend on before it: by the '
    'launcher, or by enable()')
DEEPSPEED_MUON = Row(ATTACHED, "Muon", "DeepSpeed",
    "use AdamW, Adam or Lion: ZeRO cuts parameters anywhere, and Muon updates whole matrices")
ZERO_1_REDUCES = Row(ATTACHED, '`overlap` "backward", "both"', "ZeRO-1 without `overlap_comm`",
    'use "off", or zero_optimization.overlap_comm true: else ZeRO-1 reduces when backward has ended', values=BACKWARD)
SAVED_APART = Row(ATTACHED, '`"layout": "in_place"`; `mirror`', "DeepSpeed's `use_node_local_storage`",
    'save to a folder that all ranks see, or use "stock" and no mirror: checkpoints are of all ranks together there')
AVERAGED = Row(ATTACHED, '`overlap` "forward", "both"',
    "Lightning's `StochasticWeightAveraging`, `WeightAveraging`, or a module that is compiled as a whole",
    'use "off" or "backward" beside {averaging}, and where all of it is compiled', values=FORWARD)
VERL_CLIPS = Row(ATTACHED, "`gradient_memory`; `keep_grads` false", "verl",
    "use true, and no gradient_memory: verl clips gradients itself, after backward")
VERL_GENERATES = Row(ATTACHED, '`overlap` "forward", "both"', "verl",
    'use "off" or "backward": verl gives new weights to generation after its step', values=FORWARD)
MEGATRON_BUFFER = Row(ATTACHED, "`gradient_memory`; `keep_grads` false", "Megatron-Core",
    "use true, and no gradient_memory: Megatron keeps gradients in a buffer of its own, and clips them there")
MEGATRON_GATHERS = Row(ATTACHED, '`overlap` "forward", "both"', "Megatron-Core",
    'use "off" or "backward": Megatron gathers new weights when its step returns', values=FORWARD)
MEGATRON_REDUCES = Row(ATTACHED, '`overlap` "backward"', "Megatron-Core without `--overlap-grad-reduce`",
    'use "off", or --overlap-grad-reduce: else Megatron reduces when backward has ended')
MEGATRON_CHANGES = Row(ATTACHED, '`overlap` "backward"',
    "a loss scale of Megatron-Core's (`--fp16`, `--loss-scale`); `--calculate-per-token-loss`",
    'use "off": Megatron scales all gradients in place between their reduction and the step, so that no update that '
    'was made before would count')
MEGATRON_GRAPHS = Row(ATTACHED, '`overlap` "backward"', "Megatron-Core with CUDA graphs of whole iterations",
    'use "off", or leave --cuda-graph-scope full_iteration out: a graph does not say which reductions have ended')
MEGATRON_LOCAL = Row(ATTACHED, "`offload.integrations.megatron`",
    'Megatron-Core\'s local checkpoints, with `layout="in_place"`',
    "leave --non-persistent-ckpt-type local out: they have no folder that all ranks see, so state is not in them")
MEGATRON_MIRRORS = Row(ATTACHED, "`mirror`", 'Megatron-Core with `layout="stock"`',
    'leave it out, or use enable(..., layout="in_place"): checkpoints that are all Megatron\'s are not mirrored')
MEGATRON_WHOLE = Row(ATTACHED, "`offload.integrations.megatron`",
    "an optimizer of Megatron-Core's that is not distributed, precision-aware and offloaded to the CPU",
    "give --use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer, which OptimizerConfig "
    "has too: ours takes the place of what they make. Or disable() it")
MEGATRON_FSDP = Row(ATTACHED, "`offload.integrations.megatron`", "Megatron-FSDP",
    "leave --use-megatron-fsdp out: it makes no shards of a distributed optimizer. torch's FSDP2 takes offload.AdamW")
MEGATRON_WEIGHTS = Row(ATTACHED, "`offload.integrations.megatron`", "weights of Megatron-Core in fp8 or fp32",
    "use --bf16 or --fp16 for all that train, without --fp8-param-gather: --fp8-format still computes in fp8")
MEGATRON_ROUNDED = Row(ATTACHED, "`offload.integrations.megatron`", "Megatron-Core's types of state, but for fp32",
    'leave it fp32: state_format says how state is stored')
# fmt: on

TABLE = {name: row for name, row in globals().items() if isinstance(row, Row)}
