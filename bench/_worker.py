"""One contender in a process of its own: what `_contest.py` starts and talks to.

Requests and answers are lines of JSON on standard input and output; whatever the contender prints goes to standard
error, which is its log. The first request describes the contender (see `_contest.Contender`), the others are
`{"run": [[tokens, first, count], ...]}`: so many iterations on batches of so many tokens, the first of that number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import computing, cores
from torch.nn.functional import cross_entropy

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 100.0
"""Every contender takes the norm in each step; no gradient has so large a one, as in a training that has settled."""
SEED = 1234


def build(request: dict[str, Any]) -> Any:
    """Return the model: that of the request, if it has one."""
    if "model" in request:
        return request["model"]
    from offload.cli.model import Shape, build_model

    shape = Shape(**request["shape"])
    return build_model(shape, seq=request["seq"], dtype=torch.bfloat16, device="cpu", seed=SEED)


def batch(step: int, tokens: int) -> torch.Tensor:
    """Return one window of `tokens` + 1 tokens that depends on the step alone; shape [1, tokens + 1]."""
    generator = torch.Generator().manual_seed(step)
    # Every third token follows from the one before it, so that there is something to learn.
    window = torch.randint(0, 250, (1, tokens + 1), generator=generator)
    window[:, 2::3] = (window[:, 1:-1:3] * 7 + 3) % 250
    return window


def loss_of(found: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the loss of what a model has found: logits, alone or among other things."""
    logits = getattr(found, "logits", found)
    return cross_entropy(logits.float().reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1))


class Plain:
    """Forward and backward, and no optimizer: what an iteration would take if the optimizer were free."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.model = build(request)
        self.engine: Any = None

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(input_ids=window[:, :-1]), window)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    has_optimizer = False

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
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad()


class Offloaded(Plain):
    """offload.AdamW."""

    has_optimizer = True

    def __init__(self, request: dict[str, Any]) -> None:
        import offload

        super().__init__(request)
        config = offload.OffloadConfig.from_dict(request["settings"])
        self.optimizer = offload.AdamW(self.model.parameters(), **SETTINGS, offload=config)
        self.engine = self.optimizer.engine

    def step(self) -> None:
        self.optimizer.clip_grad_norm_(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()


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
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
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


class DeepSpeed:
    """DeepSpeed's ZeRO-3, stock or with our backend."""

    def __init__(self, request: dict[str, Any]) -> None:
        alone()
        import deepspeed
        import deepspeed.ops

        # Collectives of one process need no native part, which would be compiled at first use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("WARNING")
        os.environ["DS_ACCELERATOR"] = "cpu"
        settings = dict(request["settings"])
        model = build(request)
        client = None
        self.has_optimizer = not settings.pop("no_optimizer", False)
        if not self.has_optimizer:
            client = torch.optim.SGD(model.parameters(), lr=0.0)
            settings |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        else:
            adam = {**SETTINGS, "betas": list(SETTINGS["betas"]), **settings.pop("adam", {})}
            settings["optimizer"] = {"type": "AdamW", "params": adam}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            **settings,
        }
        if "multi_tier_offload" in config:
            import offload.integrations.deepspeed as offload_deepspeed

            offload_deepspeed.enable()
        self.ds, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), optimizer=client, config=config
        )
        self.engine = getattr(self.ds.optimizer, "offload", None)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return loss_of(self.ds(input_ids=window[:, :-1]), window)

    def backward(self, loss: torch.Tensor) -> None:
        self.ds.backward(loss)

    def step(self) -> None:
        self.ds.step()

    def close(self) -> None:
        self.ds.destroy()


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain": Plain,
    "torch": Torch,
    "offload": Offloaded,
    "fsdp": Fsdp,
    "deepspeed": DeepSpeed,
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
        disk = opened(request["settings"]["path"], io_backend="threads", checksum=False)
        tile, self.tiles = (MIB, 4) if small else (4 * MIB, 48)
        self.moved = 2 * tile * self.tiles
        self.mixer = Mixer(*self.stack.enter_context(disk), tile, 4, 16)
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


def memory() -> dict[str, int]:
    """Return this process's resident bytes.

    The most ever and now, mapped files included; of those now what is its own and what is of files; what is pinned.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {words[0].rstrip(":"): int(words[1]) << 10 for words in map(str.split, lines) if words[-1] == "kB"}
    return {
        "peak_bytes": held["VmHWM"],
        "resident_bytes": held["VmRSS"],
        "own_bytes": held["RssAnon"] + held["RssShmem"],
        "file_bytes": held["RssFile"],
        "pinned_bytes": held.get("VmPin", 0) + held.get("VmLck", 0),
    }


def kernel_io() -> dict[str, int]:
    """Return what the kernel says that this process has read and written on devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {
        name: int(value)
        for name, value in (line.split(": ") for line in lines)
        if name in ("read_bytes", "write_bytes")
    }


def moved(before: dict[str, int]) -> dict[str, int]:
    """Return the bytes that this process has read and written on devices since `kernel_io` returned `before`."""
    return {name: count - before[name] for name, count in kernel_io().items()}


def iterate(contender: Any, window: torch.Tensor) -> dict[str, float]:
    before = kernel_io()
    times = [time.perf_counter()]
    with computing():
        loss = contender.forward(window)
        times.append(time.perf_counter())
        contender.backward(loss)
        times.append(time.perf_counter())
    contender.step()
    times.append(time.perf_counter())
    after = kernel_io()
    names = ("forward_s", "backward_s", "step_s")
    found = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
    if not contender.has_optimizer:
        del found["step_s"]
    found["iteration_s"] = sum(found.values())
    found["loss"] = float(loss.detach())
    found |= {f"kernel_{name}": float(after[name] - before[name]) for name in before}
    return found


def run(contender: Any, parts: list[list[int]]) -> list[dict[str, Any]]:
    from offload.predict import predict

    found = []
    for tokens, first, count in parts:
        for step in range(first, first + count):
            engine = contender.engine
            extra: dict[str, Any] = {}
            if engine is not None and step == first + count - 1:
                extra["predicted_step_s"] = predict(engine.plan, engine.rates).step_s
            one: dict[str, Any] = iterate(contender, batch(step, tokens))
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
    if contender.engine is not None:
        contender.engine.finish()  # a step that goes on would take its time from whoever is next
    return found


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


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is log
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

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
    change(request["settings"].pop("changes", {}), request["settings"])
    contender = KINDS[request["kind"]](request)
    answer({"set_up_s": time.perf_counter() - started_s, **memory()})
    for line in sys.stdin:
        answer({"iterations": run(contender, json.loads(line)["run"]), **memory()})
    contender.close()


if __name__ == "__main__":
    serve()
