"""Trains a tiny GPT of Megatron-Core on the CPU, with gloo; run by `test_megatron.py` in ranks.

    python megatron_runs.py FOLDER CASES [late]

CASES is a JSON list of `Case`'s fields. Each case is trained by stock Megatron with our rule in memory below it, and
by ours with all state on a path, in one process; with "late" on the test accelerator. Prints a line of JSON for each
case and rank. The processes that Megatron starts to write a checkpoint import this module: it imports nothing large.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from small import SETTINGS, digest, say

sys.path.append(str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        name: What it is called.
        steps: How many.
        passes: Backward passes a step.
        tp: Ranks among which weights are cut.
        pp: Stages of the model, each in ranks of its own; passes are in Megatron's schedule of stages (1F1B) then.
        fp16: In the place of bf16; its loss scale begins so high that steps are skipped.
        scale: A constant loss scale.
        clip: Norm to clip to.
        overlap: Reduce in backward, in buckets of 20,000 elements, and gather in forward.
        hides: Ours updates in backward.
        ends: Reductions end while backward goes on.
        skipped: A step that is not made, though its gradients have come.
        experts: How many, of which each rank has its own.
        frozen: Freeze the first layer and the embedding.
        tied: The output layer's weight is the embedding's.
        format: Ours, of state.
        gpu: Bytes of state on the device.
        kinds: By which optimizers, in their order.
        save: A folder to save to at last.
        load: A folder to load from at first.
        at: The steps behind what is loaded.
        behind: Save while training goes on, by a process that Megatron forks.
        te: Have Megatron believe that TransformerEngine is there when it asks for the number of updates.
        keep: A file to keep the state in, without its last part, the rank.
        kept: Files of another case, of any number of ranks, that have this one's state, likewise.
        sharding: Megatron's name of the format.
        layout: Ours.
        mirror: Ours; in it a folder that is saved to in place is mirrored.
    """

    name: str
    steps: int = 8
    passes: int = 1
    tp: int = 1
    pp: int = 1
    fp16: bool = False
    scale: float | None = None
    clip: float = 1.0
    overlap: bool = False
    hides: bool = False
    ends: bool = False
    skipped: int = -1
    experts: int = 0
    frozen: bool = False
    tied: bool = False
    format: str = "exact"
    gpu: int = 0
    kinds: list[str] = field(default_factory=lambda: ["memory", "offload"])
    save: str = ""
    load: str = ""
    at: int = 0
    behind: bool = False
    te: bool = False
    keep: str = ""
    kept: str = ""
    sharding: str = "dp_reshardable"
    layout: str = "stock"
    mirror: str = ""


def play_cuda(device: str = "cpu") -> None:
    """Have Megatron-Core, which names "cuda" outright, run on another device; for this thread."""
    import torch
    from packaging.version import Version
    from torch.overrides import TorchFunctionMode

    place, module = torch.device(device), getattr(torch, device)

    def is_cuda(value: Any) -> bool:
        return str(value).startswith("cuda") if isinstance(value, str | torch.device) else False

    class CudaIsElsewhere(TorchFunctionMode):
        """`device="cuda"` and `.cuda()` make tensors of the device; `.type()` says that they are CUDA's."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: place if is_cuda(value) else value for name, value in (kwargs or {}).items()}
            if func is torch.Tensor.cuda:
                return args[0].to(place)
            if func is torch.Tensor.to:
                args = tuple(place if is_cuda(value) else value for value in args)
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return f"torch.cuda.{func(*args).rpartition('.')[2]}"
            return func(*args, **kwargs)

    torch.cuda.current_device = lambda: place  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: module.synchronize()
    torch.cuda.empty_cache = lambda *_: None
    for name in ("Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, getattr(module, name))
    tracker = import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None  # likewise
    import_module("megatron.core.utils").get_te_version = lambda: Version("0")  # without TransformerEngine it raises
    CudaIsElsewhere().__enter__()


class Training:
    """A model, Megatron's optimizer of it, and a schedule."""

    def __init__(self, case: Case, kind: str, folder: Path) -> None:
        import torch

        parts = "parallel_state", "distributed", "optimizer", "models.gpt", "models.gpt.gpt_layer_specs"
        self.parallel, distributed, optimizers, gpts, specs = (
            import_module(f"megatron.core.{name}") for name in parts
        )
        self.case, self.kind, self.reads, self.undo = case, kind, 0, contextlib.ExitStack()
        import_module("megatron.core.optimizer.distrib_optimizer").HAVE_APEX_OR_TE = case.te
        self.parallel.destroy_model_parallel()
        apart = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
        apart["expert_model_parallel_size"] = case.experts or 1
        self.parallel.initialize_model_parallel(**apart)
        torch.manual_seed(1234)
        dtype = torch.float16 if case.fp16 else torch.bfloat16
        types = {"params_dtype": dtype, "bf16": not case.fp16, "fp16": case.fp16}
        fused = "masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation"
        config = import_module("megatron.core.transformer").TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            use_cpu_initialization=True,
            pipeline_dtype=dtype,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            num_moe_experts=case.experts or None,
            moe_token_dispatcher_type="allgather",
            **apart,
            **types,
            **{f"{name}_fusion": False for name in fused},
        )
        layers = specs.get_gpt_layer_local_spec(num_experts=case.experts or None)
        gpt = gpts.GPTModel(
            config,
            layers,
            vocab_size=128,
            max_sequence_length=32,
            share_embeddings_and_output_weights=case.tied,
            pre_process=self.parallel.is_pipeline_first_stage(),
            post_process=self.parallel.is_pipeline_last_stage(),
        )
        gpt = gpt.to(dtype).cuda()
        first = "embedding.", "decoder.layers.0."  # of the stage that begins with the embedding
        for name, parameter in gpt.named_parameters() if case.frozen and gpt.pre_process else ():
            parameter.requires_grad_(not name.startswith(first))
        gathered = {"overlap_grad_reduce": case.overlap, "overlap_param_gather": case.overlap}
        ddp = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=20000, **gathered
        )
        self.model = distributed.DistributedDataParallel(config, ddp, gpt)
        self.door = door = import_module("offload.integrations.megatron")
        ours = {}
        if kind == "offload":
            more = {
                "state_format": case.format,
                "gpu_memory": case.gpu,
                **({"mirror": case.mirror} if case.mirror else {}),
            }
            overlap = "backward" if case.hides else "off"
            door.enable({**SETTINGS, **more, "overlap": overlap, "paths": [str(folder)]}, layout=case.layout)
            ours = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
        if case.ends:
            self._end_reductions()
        optimizer_config = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            clip_grad=case.clip,
            use_distributed_optimizer=True,
            loss_scale=case.scale,
            initial_loss_scale=2.0**19,
            overlap_param_gather=case.overlap,
            log_num_zeros_in_grad=True,
            **types,
            **ours,
        )
        self.optimizer = optimizers.get_megatron_optimizer(optimizer_config, [self.model])
        config.no_sync_func, config.grad_scale_func = self.model.no_sync, self.optimizer.scale_loss
        config.finalize_model_grads_func = self._finalize
        self.members = self.optimizer.chained_optimizers
        self.engines = [inner.engine for inner in door.inner_optimizers(self.optimizer)]
        self.figures: Counter[str] = Counter()
        if kind == "memory":
            self._take_our_rule()
        schedule = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
        self.schedule = schedule(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=40,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=40,
            wd_incr_style="constant",
        )
        self.said: list[Any] = []
        self.queue = import_module("megatron.core.dist_checkpointing.strategies.async_utils").AsyncCallsQueue()
        self.meta = {"distrib_optim_sharding_type": case.sharding}

    def _take_our_rule(self) -> None:
        """Have stock Megatron's inner optimizers, over their own fp32 masters, step as our rule does in memory."""
        self.rules = [self._rule_below(member.optimizer) for member in self.members]

    def _rule_below(self, theirs: Any) -> Any:
        import offload

        for group in theirs.param_groups:
            for master in group["params"]:
                master.requires_grad_(True)
        groups = [{"params": group["params"]} for group in theirs.param_groups if group["params"]]
        if not groups:  # a stage that trains nothing
            theirs.step = lambda: None
            return SimpleNamespace(close=lambda: None)
        rule = offload.AdamW(groups, offload={"host_memory": "64MiB", "threads": 1})

        def step() -> None:
            here = (group for group in theirs.param_groups if group["params"])
            for group, own in zip(rule.param_groups, here, strict=True):
                group.update({name: own[name] for name in ("lr", "weight_decay", "betas", "eps")})
            for master, state in theirs.state.items():  # as it was loaded
                if state and master not in rule.state:
                    rule.state[master] = {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}
            rule.step()
            for master, state in rule.state.items():
                theirs.state[master] = {name: value.clone() for name, value in state.items()}

        theirs.step = step
        return rule

    def _end_reductions(self) -> None:
        """Have a reduction end before the next one begins, and say so when asked, as NCCL's do and gloo's do not."""
        kind = import_module("megatron.core.distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
        start, before = kind.start_grad_sync, vars(kind)["start_grad_sync"]
        ended = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        def start_after_others(group: Any, *arguments: Any, **options: Any) -> None:
            for other in self.model.bucket_groups + self.model.expert_parallel_bucket_groups:
                if other.grad_reduce_handle is not None:
                    other.grad_reduce_handle.wait()
                    other.grad_reduce_handle.works[:] = [ended]
            start(group, *arguments, **options)

        kind.start_grad_sync = start_after_others
        self.undo.callback(setattr, kind, "start_grad_sync", before)

    def _finalize(self, *given: Any, **named: Any) -> None:
        """Have Megatron wait for reductions; count before what has been made in backward."""
        from settling import settle

        for engine in self.engines if self.case.hides else ():
            self.figures["made in backward"] += settle(engine)
        import_module("megatron.core.distributed").finalize_model_grads(*given, **named)

    def step(self, number: int) -> None:
        """Make a step, and note what Megatron says of it."""
        import torch

        rank = self.parallel.get_data_parallel_rank()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        mask, places = (torch.ones(1, 1, 32, 32).tril() < 0.5).cuda(), torch.arange(32).expand(4, 32).cuda()

        def forward(windows: Any, model: Any) -> Any:
            tokens = next(windows)

            def loss_of(output: Any) -> Any:
                loss = output.float().mean()
                return loss, loss.detach().clone()  # Megatron changes the first one in place

            return model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]), loss_of

        seeds = (torch.Generator().manual_seed(1000 * number + 10 * each + rank) for each in range(self.case.passes))
        windows = [torch.randint(0, 128, (4, 33), generator=seed).cuda() for seed in seeds]
        losses = import_module("megatron.core.pipeline_parallel").get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(windows),
            model=[self.model],
            num_microbatches=self.case.passes,
            seq_length=32,
            micro_batch_size=4,
            forward_only=False,
        )
        if number == self.case.skipped:
            return
        took, norm, zeros = self.optimizer.step()
        for engine in self.engines if self.case.hides else ():
            for name in ("confirmed_bytes", "revoked_bytes"):
                self.figures[name] += int(engine.metrics()[f"speculation/{name}"])
        if took:
            self.schedule.step(increment=1)
        self.said.append([*map(float, losses), took, None if norm is None else float(norm), zeros])

    def sharded(self, loading: bool) -> dict[str, Any]:
        """Return Megatron's own state dict for `dist_checkpointing`."""
        model = self.model.module.sharded_state_dict()
        asked = {"model_sharded_state_dict": model, "is_loading": loading, "metadata": self.meta}
        state = self.optimizer.sharded_state_dict(**asked)
        return {"model": model, "optimizer": state}

    def _on_all(self, verb: str, strategy: Any) -> Any:
        """Return a strategy of `dist_checkpointing` that divides its work among ranks, as Megatron-LM's."""
        found = import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
        kind = getattr(found, f"FullyParallel{verb}StrategyWrapper")
        return kind(strategy, self.parallel.get_data_parallel_group(with_context_parallel=True))

    def begin_save(self, folder: str, behind: bool, saved: Callable[[], None] = lambda: None) -> None:
        """Save, or begin to where that is done behind training and `queue` knows its end; `saved` is called then."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        checkpoints = import_module("megatron.core.dist_checkpointing")
        options = {"async_sharded_save": behind, "content_metadata": self.meta}
        if hasattr(import_module("megatron.core.dist_checkpointing.strategies.torch"), "get_async_strategy"):
            # Releases after 0.16.1 save behind training by a package of its own where nothing is said.
            options["async_strategy"] = "mcore"
        strategy = self._on_all("Save", checkpoints.serialization.get_default_save_sharded_strategy())
        request = checkpoints.save(self.sharded(False), folder, strategy, **options)
        if behind:
            request.add_finalize_fn(saved)
            self.queue.schedule_async_request(request)
        else:
            saved()

    def save(self, folder: str) -> None:
        """Save, and go on for two steps where that is done behind; count how often state is read for it."""
        reads: list[Any] = []

        def counted(read: Any) -> Any:
            return lambda *arguments: reads.append(arguments) or read(*arguments)

        for engine in self.engines:
            engine.state.read = counted(engine.state.read)
        self.begin_save(folder, self.case.behind)
        for number in range(2 if self.case.behind else 0):
            self.step(self.case.at + self.case.steps + number)
        self.queue.maybe_finalize_async_calls(blocking=True)
        self.reads = len(reads)

    def _make_loadable(self, member: Any) -> None:
        member._init_optimizer_states_with_dummy_values()
        for master in member.get_parameters():
            master.requires_grad_(False)
        set_all = member._set_main_param_and_optimizer_states
        get_all = member._get_main_param_and_optimizer_states

        def set_but_step(weight: Any, tensors: dict[str, Any]) -> None:
            # Of torch's own Adam Megatron 0.16.1 would set `step`, too, which no file has: to the dummy step's.
            set_all(weight, {**tensors, "step": get_all(weight)["step"]})

        member._set_main_param_and_optimizer_states = set_but_step

    def load(self, folder: str) -> None:
        if self.kind == "memory":  # stock cannot load into an optimizer that has made no step
            for rule, member in zip(self.rules, self.members, strict=True):
                self._make_loadable(member)
                rule.close()
        checkpoints = import_module("megatron.core.dist_checkpointing")
        self.meta = checkpoints.load_content_metadata(folder)
        strategy = self._on_all("Load", checkpoints.serialization.get_default_load_sharded_strategy(folder))
        state = checkpoints.load(
            sharded_state_dict=self.sharded(True), checkpoint_dir=folder, sharded_strategy=strategy
        )
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.step(increment=self.case.at)
        if self.kind == "memory":
            self._take_our_rule()

    def state(self) -> dict[str, Any]:
        """Return weights by name, and state by name with where a shard begins."""
        if self.case.overlap:
            self.model.start_param_sync(force_sync=True)
        found: dict[str, Any] = {}
        for name, weight in self.model.named_parameters():
            found[name] = weight.detach().cpu().clone()
            for member in self.members:
                if weight not in member.model_param_group_index_map:
                    continue
                start = member._get_model_param_range_map(weight)["param"].start
                tensors = member._get_main_param_and_optimizer_states(weight)
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    found[f"{name} {key} {start}"] = tensors[key].detach().cpu().clone().view(-1)
        return found

    def close(self) -> None:
        for engine in self.engines if self.case.mirror else ():
            engine.checkpoints.wait_mirror()
        for rule in self.rules if self.kind == "memory" else self.door.inner_optimizers(self.optimizer):
            rule.close()
        self.undo.close()
        self.door.disable()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    import torch

    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def joined(kept: str) -> dict[str, Any]:
    """Return the state that ranks have kept, as that of one rank."""
    import torch

    parts = [torch.load(file) for file in sorted(Path(kept).parent.glob(f"{Path(kept).name}.*"))]
    whole = {name: weight for name, weight in parts[0].items() if " " not in name}
    pieces: dict[str, dict[int, Any]] = {}
    for name, piece in ((name, piece) for part in parts for name, piece in part.items() if " " in name):
        pieces.setdefault(name.rpartition(" ")[0], {})[int(name.rpartition(" ")[2])] = piece
    return {
        **whole,
        **{f"{name} 0": torch.cat([each[start] for start in sorted(each)]) for name, each in pieces.items()},
    }


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train a case by each kind; return what they have said, and in what they differ."""
    import torch

    rank = torch.distributed.get_rank()
    answers: dict[str, Any] = {"name": case.name, "rank": rank}
    states = []
    for kind in case.kinds:
        training = Training(case, kind, folder)
        if case.load:
            training.load(case.load)
        for number in range(case.at, case.at + case.steps):
            training.step(number)
        if case.save:
            training.save(case.save)
        states.append(training.state())
        answers[kind] = training.said
        if case.keep:
            torch.save(states[-1], f"{case.keep}.{rank}")
        if case.kept:
            answers["differing"] = differing(states[-1], joined(case.kept))
        if kind == "offload":
            answers |= {"reads": training.reads, "figures": training.figures}
            answers["resident"] = max(engine.metrics()["resident_share"] for engine in training.engines)
            plans = [engine.plan for engine in training.engines]
            answers["names"] = [parameter.name for plan in plans for parameter in plan.layout.parameters]
        training.close()
    answers["digest"] = digest(states[-1][name] for name in sorted(states[-1]))
    tied = [weight for weight in training.model.parameters() if getattr(weight, "shared_embedding", False)]
    answers["tied"] = [digest([weight]) for weight in tied]
    answers["state"] = sum(1 for name in states[0] if " " in name)
    if len(states) == 2:
        answers["differing"] = differing(*states)
    return answers


def main(folder: Path, cases: list[dict[str, Any]], device: str = "cpu") -> None:
    import torch

    backends = "gloo"
    if device == "late":
        late, backends = import_module("accelerator.late"), "cpu:gloo,late:late"
        late.load(1)
        late.tell_offload()
    play_cuda(device)
    torch.distributed.init_process_group(backends)
    torch.set_num_threads(1)
    for fields in cases:
        say(**run(Case(**fields), folder))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
