"""One contender in a process of its own: what `_contest.py` starts and talks to.

Requests and answers are lines of JSON on standard input and output; whatever the contender prints goes to standard
error, which is its log. The first request describes the contender (see `_contest.Contender`) and what it trains. Of
the others, `{"run": [[tokens, first, count], ...]}` asks for so many iterations on batches of rows of so many tokens,
the first of that number, and `{"digest": true}` for a checksum of the weights. Who finds no memory for something
answers what that was, as "short_of", and ends; any other failure ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from _common import computing, cores, kernel_io, memory, moved
from torch.nn.functional import cross_entropy

from offload.cli.model import Shape, build_model
from offload.errors import InfeasiblePlanError
from offload.memory.arenas import available_bytes

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 100.0
"""Every contender takes the norm in each step; no gradient has so large a one, as in a training that has settled."""
SEED = 1234


SHORTAGES = (
    "allocate memory",
    "no more memory",
    "no memory for",
    "out of memory",
    "bad_alloc",
    "Cannot allocate",
    "MemoryError",
)
"""How torch, this package, C++ and the system say that there is no more memory."""


def build(request: dict[str, Any]) -> Any:
    """Return the model: as users build it, or the one that takes no memory while it is made; or Megatron's own."""
    if request["kind"] == "megatron":
        return import_module("_megatron").build(request)
    shape = Shape(**request["shape"])
    if request.get("lean"):
        import _llama

        if "offload_param" in request["settings"].get("zero_optimization", {}):
            return in_zero(request["settings"], lambda: _llama.Model(shape))
        return _llama.build(shape, SEED, request["settings"].pop("weights_in", None))
    return build_model(shape, seq=request["seq"], dtype=torch.bfloat16, device=device_of(request), seed=SEED)


def device_of(request: dict[str, Any]) -> str:
    """Return where weights are."""
    return str(request.get("device", "cpu"))


def batch(step: int, tokens: int, rows: int = 1) -> torch.Tensor:
    """Return windows of `tokens` + 1 tokens that depend on the step alone; shape [rows, tokens + 1]."""
    generator = torch.Generator().manual_seed(step)
    # Every third token follows from the one before it, so that there is something to learn.
    window = torch.randint(0, 250, (rows, tokens + 1), generator=generator)
    window[:, 2::3] = (window[:, 1:-1:3] * 7 + 3) % 250
    return window


def loss_of(found: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the loss of what a model has found: logits, alone or among other things."""
    logits = getattr(found, "logits", found)
    return cross_entropy(logits.float().reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1))


class Plain:
    """Forward and backward, and no optimizer: what an iteration would take if the optimizer were free."""

    has_optimizer = False

    def __init__(self, request: dict[str, Any]) -> None:
        self.model = request["model"]
        self.clip = request.get("clip", CLIP)
        self.engine: Any = None

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(input_ids=window[:, :-1]), window)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.model.zero_grad()

    def close(self) -> None:
        pass


class Torch(Plain):
    """torch.optim.AdamW over fp32 masters, as mixed precision without offloading does it.

    The fp32 gradients are kept, so that nothing is allocated in a step. With `save_on_cpu`, backward's tensors are
    copied as torch does it where they lie on a device.
    """

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.saves = request["settings"].pop("save_on_cpu", False)
        self.weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, **SETTINGS, **request["settings"])

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu() if self.saves else contextlib.nullcontext():
            return super().forward(window)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad()


class Mastered:
    """An optimizer over fp32 copies of weights; a 16-bit gradient goes as soon as it has become an fp32 one."""

    def __init__(self, weights: Iterable[torch.nn.Parameter], make: Callable[[list[Any]], Any]) -> None:
        self._weights = list(weights)
        self._masters = [torch.nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._inner = make(self._masters)
        self.param_groups = self._inner.param_groups

    @torch.no_grad()
    def step(self, clip: float | None = None) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, clip)
        self._inner.step()
        self._inner.zero_grad()
        for master, weight in zip(self._masters, self._weights, strict=True):
            weight.copy_(master)

    def zero_grad(self) -> None:
        """Gradients have gone in the step."""

    def close(self) -> None:
        pass


class Lean(Plain):
    """torch.optim.AdamW over fp32 masters in the least memory."""

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        make = partial(torch.optim.AdamW, fused=True, **SETTINGS)
        self.optimizer = Mastered(self.model.parameters(), make)

    def step(self) -> None:
        self.optimizer.step(self.clip)


class Torchao(Plain):
    """torchao's CPUOffloadOptimizer. Its masters are the bf16 weights and its moments are bf16; it does not clip."""

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(request)
        self.optimizer = CPUOffloadOptimizer(self.model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Offloaded(Plain):
    """offload.AdamW."""

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        import offload

        super().__init__(request)
        config = offload.OffloadConfig.from_dict(request["settings"])
        self.optimizer = offload.AdamW(self.model.named_parameters(), **SETTINGS, offload=config)
        self.engine = self.optimizer.engine

    def step(self) -> None:
        self.optimizer.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()


class Finished(Offloaded):
    """offload.AdamW, whose steps have ended before anything else is done.

    With `overlap`, steps go on in forward and are made in backward, from the first one on, in what memory is left.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        if request["settings"]["overlap"] != "off":
            self.optimizer.overlap_forward(self.model)
            self.optimizer.engine.speculate(True)

    def step(self) -> None:
        super().step()
        self.optimizer.finish()


class Fsdp(Plain):
    """FSDP2 of one rank: fp32 parameters computed with in bf16, and torch's AdamW over them."""

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        alone()
        torch.distributed.init_process_group("gloo")
        super().__init__(request)
        self.model.float()
        offloads = request["settings"]["offloads"]
        policies = {
            "mesh": torch.distributed.device_mesh.init_device_mesh("cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
        }
        for module in self.model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    fully_shard(layer, **policies)
        fully_shard(self.model, **policies)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS, foreach=True)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def alone() -> None:
    """Say to what is about to import DeepSpeed that there is one process, as its launcher would.

    Without the last variable it asks the system for the cores in every reduction.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(one, LOCAL_SIZE="1")


def adamw_of(**more: Any) -> dict[str, Any]:
    """Return what DeepSpeed's config says of AdamW."""
    return {"type": "AdamW", "params": {**SETTINGS, "betas": list(SETTINGS["betas"]), **more}}


def without_native_collectives() -> None:
    """Have DeepSpeed use gloo on a CPU: a native part of its own would be compiled when it is initialized."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


ALWAYS = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 10**9}
"""Of a config of DeepSpeed's."""


def with_deepspeed(model: Any, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Return DeepSpeed's engine; with our backend, if the settings say something of that."""
    import deepspeed

    without_native_collectives()
    deepspeed.utils.logger.setLevel("WARNING")
    if "multi_tier_offload" in settings:
        import offload.integrations.deepspeed as offload_deepspeed

        offload_deepspeed.enable()
    weights = list(model.parameters())
    return deepspeed.initialize(
        model=model, model_parameters=weights, optimizer=optimizer, config={**ALWAYS, **settings}
    )[0]


def in_zero(settings: dict[str, Any], build: Callable[[], Any]) -> Any:
    """Return a model that is made where ZeRO-3 has its weights, with values as torch initialises them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    without_native_collectives()
    with deepspeed.zero.Init(config_dict_or_path={**ALWAYS, **settings}, dtype=torch.bfloat16):
        return build()


class DeepSpeed(Plain):
    """DeepSpeed's ZeRO, stock or with our backend."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        alone()
        if device_of(request) == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        settings = {"gradient_clipping": self.clip, **request["settings"]}
        client = None
        self.has_optimizer = not settings.pop("no_optimizer", False)
        if not self.has_optimizer:
            client = torch.optim.SGD(self.model.parameters(), lr=0.0)
            settings |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        else:
            settings["optimizer"] = adamw_of(**settings.pop("adam", {}))
        settings["train_micro_batch_size_per_gpu"] = request.get("rows", 1)
        self.ds = self.model = with_deepspeed(self.model, settings, client)
        self.engine = getattr(self.ds.optimizer, "offload", None)

    def backward(self, loss: torch.Tensor) -> None:
        self.ds.backward(loss)

    def step(self) -> None:
        self.ds.step()

    def close(self) -> None:
        self.ds.destroy()


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain": Plain,
    "torch": Torch,
    "lean": Lean,
    "torchao": Torchao,
    "offload": Offloaded,
    "finished": Finished,
    "fsdp": Fsdp,
    "deepspeed": DeepSpeed,
    "megatron": lambda request: import_module("_megatron").Megatron(request),
}


class Bounds:
    """What the hardware allows, measured in the same rounds as everything else."""

    def __init__(self, request: dict[str, Any]) -> None:
        from _sessions import MIB
        from kernel import Buffers
        from paths import Mixer, opened

        from offload.kernels import CpuUpdateKernel
        from offload.kernels.reference import segment_table

        small = request["settings"]["smoke"]
        self.stack = contextlib.ExitStack()
        disk = opened(request["settings"]["path"], io_backend="threads")
        tile, self.tiles = (MIB, 4) if small else (4 * MIB, 48)
        self.moved = 2 * tile * self.tiles
        self.mixer = Mixer(*self.stack.enter_context(disk), tile, 4, 16, verify=False)
        numel = 1 << 16 if small else 16_000_000
        self.buffers = Buffers(numel)
        self.kernel = CpuUpdateKernel(threads=cores())
        self.table = segment_table([self.buffers.segment(4)])

    def run(self) -> dict[str, float]:
        from kernel import BYTES_PER_PARAMETER

        from offload.kernels import StreamVariant

        started_s = time.perf_counter()
        self.mixer.run(self.tiles)
        disk_s = time.perf_counter() - started_s
        seconds = []
        for variant in (StreamVariant.PLAIN, StreamVariant.PREFETCH, StreamVariant.WEIGHT_NONTEMPORAL):
            started_s = time.perf_counter()
            self.kernel.stream(self.table, variant)
            seconds.append(time.perf_counter() - started_s)
        nbytes = BYTES_PER_PARAMETER * self.buffers.master.numel()
        return {"disk_bytes_per_s": self.moved / disk_s, "memory_bytes_per_s": nbytes / min(seconds)}

    def close(self) -> None:
        self.kernel.close()
        self.stack.close()


def tuned_aio(folder: str, small: bool) -> dict[str, Any]:
    """Return the settings of DeepSpeed's aio that move most here, and what each of those tried reached.

    A sweep as DeepSpeed's own `ds_nvme_tune` does it, over fewer values: reads and writes of a subgroup's tensor.
    """
    from deepspeed.accelerator import get_accelerator

    native = get_accelerator().create_op_builder("AsyncIOBuilder").load()
    nbytes = (1 if small else 40) << 20
    file = str(Path(folder) / "tune")
    tried: list[dict[str, Any]] = []
    for block_size in (1 << 20, 8 << 20):
        for queue_depth in (8, 32):
            for intra_op_parallelism in (1, 2, 4):
                handle = native.aio_handle(block_size, queue_depth, False, True, intra_op_parallelism)
                buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
                best_s = float("inf")
                for _ in range(3):
                    started_s = time.perf_counter()
                    handle.sync_pwrite(buffer, file, 0)
                    handle.sync_pread(buffer, file, 0)
                    best_s = min(best_s, time.perf_counter() - started_s)
                handle.free_cpu_locked_tensor(buffer)
                settings = {
                    "block_size": block_size,
                    "queue_depth": queue_depth,
                    "intra_op_parallelism": intra_op_parallelism,
                    "single_submit": False,
                    "overlap_events": True,
                }
                tried.append({"settings": settings, "bytes_per_s": 2 * nbytes / best_s})
    best = max(tried, key=lambda found: found["bytes_per_s"])
    return {"best": best["settings"], "tried": tried}


class Training:
    """A contender, and what is known of its memory.

    Attributes:
        contender: One of `KINDS`.
        marks: Of a request that is "lean": what `memory` said when something had been done for the last time.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self.marks: dict[str, dict[str, int]] = {}
        if request["kind"] == "deepspeed":
            alone()
            import deepspeed  # noqa: F401
        # What everybody's first step loads: torch's own optimizers, its compiler and its threads.
        torch.optim.AdamW([torch.ones(1, requires_grad=True)])
        torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
        self._mark("process")
        request["model"] = model = build(request)
        self._weights = list(model.parameters())
        self._mark("weights")
        change(request["settings"].pop("changes", {}), request["settings"])
        self.contender = KINDS[request["kind"]](request)
        self._mark("optimizer")

    def _mark(self, what: str) -> None:
        if self._request.get("lean"):
            self.marks[what] = memory()

    def iterate(self, window: torch.Tensor) -> dict[str, float]:
        """Train once; return what that took."""
        contender, before = self.contender, kernel_io()
        times = [time.perf_counter()]
        with computing() if device_of(self._request) == "cpu" else contextlib.nullcontext():
            loss = contender.forward(window)
            if "forward" not in self.marks:
                self._mark("forward")
            times.append(time.perf_counter())
            contender.backward(loss)
            self._mark("backward")
            times.append(time.perf_counter())
        contender.step()
        self._mark("step")
        value = float(loss.detach())  # waits for all that the next forward pass would wait for
        times.append(time.perf_counter())
        names = ("forward_s", "backward_s", "step_s")
        found = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
        if not contender.has_optimizer:
            del found["step_s"]
        found |= {"iteration_s": sum(found.values()), "loss": value}
        return found | {f"kernel_{name}": float(count) for name, count in moved(before).items()}

    def run(self, parts: list[list[int]]) -> list[dict[str, Any]]:
        """Train as a request says; return what each iteration took."""
        from offload.predict import predict

        found, engine, rows = [], self.contender.engine, self._request.get("rows", 1)
        for tokens, first, count in parts:
            for step in range(first, first + count):
                extra: dict[str, Any] = {}
                if engine is not None and step == first + count - 1:
                    extra["predicted_step_s"] = predict(engine.plan, engine.rates).step_s
                window = batch(step, tokens, rows).to(device_of(self._request))
                one: dict[str, Any] = self.iterate(window)
                if engine is not None:
                    metrics = engine.metrics()
                    one["engine_step_s"] = metrics["step_s"]
                    one["resident_share"] = metrics["resident_share"]
                    one["path_bytes"] = [
                        metrics[f"path/{number}/{verb}_bytes"]
                        for number in range(len(engine.plan.budgets.paths))
                        for verb in ("read", "write")
                    ]
                found.append({"tokens": tokens, "number": step - first, **one, **extra})
        if engine is not None:
            engine.finish()  # a step that goes on would take its time from whoever is next
        return found

    def planned(self) -> dict[str, Any]:
        """Return what the plan of ours says."""
        engine = self.contender.engine
        if engine is None:
            return {}
        plan = engine.plan
        return {
            "staging_bytes": plan.staging_bytes,
            "overhead_bytes": plan.overhead_bytes,
            "gradient_bytes": plan.budgets.gradient_bytes,
            "host_bytes": plan.host_bytes,
            "gpu_share": gpu_share(plan),
        }

    def digest(self) -> int:
        """Return a checksum of the weights; DeepSpeed's are elsewhere, and it is 0."""
        found = 0
        for weight in self._weights if self._request["kind"] != "deepspeed" else ():
            found = zlib.crc32(weight.detach().view(torch.int16).numpy(), found)
        return found


def gpu_share(plan: Any) -> float:
    """Return the share of a plan's elements that the GPU updates."""
    subgroups = plan.layout.subgroups
    total = sum(subgroup.numel for subgroup in subgroups)
    return sum(s.numel for s in subgroups if plan.updates_on_gpu(s.index)) / total if total else 0.0


def change(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    """Take something away from ours, which no setting does; for the rest of this process.

    Args:
        changes: "forgets": what staging memory holds is of no use to the next step. "paces": MB/s each way of each
            path, which is emulated.
        settings: What the contender is given.
    """
    from offload.session import parts, setup

    if changes.get("forgets"):
        from _schedules import Forgetting

        parts.Machine = Forgetting  # type: ignore[misc]
    if "paces" in changes:
        from _sessions import Pace, Throttles

        throttles = Throttles(Path(), ())
        ours = settings.get("multi_tier_offload", settings)
        throttles.rates = {path: Pace(pace, pace) for path, pace in zip(ours["paths"], changes["paces"], strict=True)}
        setup.open_tier = throttles.open  # type: ignore[assignment]


def serve(answer: Callable[[Any], None]) -> None:
    """Be what the first request says, and answer those that follow."""
    request = json.loads(sys.stdin.readline())
    if request["kind"] == "aio":
        answer(tuned_aio(request["settings"]["path"], request["settings"]["smoke"]))
        return
    if request["kind"] == "bounds":
        bounds = Bounds(request)
        answer({})
        for _ in sys.stdin:
            answer(bounds.run())
        bounds.close()
        return
    started_s = time.perf_counter()
    training = Training(request)
    answer({"set_up_s": time.perf_counter() - started_s, **memory()})
    for line in sys.stdin:
        asked = json.loads(line)
        if "digest" in asked:
            answer(training.digest())
            continue
        found: dict[str, Any] = {"iterations": training.run(asked["run"]), "marks": training.marks}
        if device_of(request) == "cuda":
            found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
            found["peak_gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
        answer({**found, "planned": training.planned(), **memory()})
    training.contender.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is log
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        serve(answer)
    except (MemoryError, RuntimeError, OSError, InfeasiblePlanError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if not isinstance(error, InfeasiblePlanError) and not any(sign in text for sign in SHORTAGES):
            raise
        answer({"short_of": f"{text} ({available_bytes():,} bytes available)"})


if __name__ == "__main__":
    main()
