"""The CPU update, side by side with torch's and DeepSpeed's, and with what this machine's memory allows.

One run, one set of buffers, interleaved rounds. What counts is the whole job: bf16 gradient in, unscaled and clipped,
bf16 weight out. It is one pass for us; for the others a conversion of the gradient, a multiplication, the update, and
a cast, as their users do it. It touches at least 28 bytes a parameter. 100% is the fastest of several ways to stream
over those bytes with next to no arithmetic, in the same run with the same number of threads.

`offload/compact16` is the whole job with moments in bf16, 20 bytes a parameter; `offload/compact8` with moments of
one byte and a master of three, 14 bytes. Each is compared with the fastest stream over those bytes and with
`cached/...`, the same update of state in the first-level cache, on one core.

With `--tune` it measures instead how far ahead of its use memory is best asked for, on this processor, for each
instruction set; and prints the row for the table in `csrc/kernels/prefetch.cpp`, and the setting that has its effect.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import cores, huge_tensors
from _harness import Option, Run, interleaved, main, ratio, show
from _needs import NATIVE

from offload import _native
from offload.formats import COMPACT8, COMPACT16, EXACT, FORMATS, SCALES, StateFormat
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels import CpuUpdateKernel, StreamVariant, instruction_sets, reference, rounding_keys
from offload.kernels.reference import SegmentTensors, minifloat, segment_table
from offload.protocols import SegmentFlag

BYTES_PER_PARAMETER = 28
COMPACT_BYTES = {COMPACT16: 20, COMPACT8: 14}
CHUNK_NUMEL = 1 << 20
CACHED_NUMEL = 1024  # 28 bytes of each are 28 KiB: a first-level cache has 32 or more
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GRAD_SCALE = 0.37
AHEAD_BYTES = (0, 256, 512, 1024, 2048, 4096, 8192)
FLAGS = SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY


class Buffers:
    """The tensors that all contenders share: fp32 state and gradient, bf16 gradient and weight; and compact state."""

    def __init__(self, numel: int) -> None:
        half, full, byte = torch.bfloat16, torch.float32, torch.uint8
        (
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.gradient32,
            self.gradient,
            self.weight,
            self.exp_avg16,
            self.exp_avg_sq16,
            self.master_upper,
            self.master_low,
            self.exp_avg8,
            self.exp_avg_sq8,
            self.scales,
        ) = huge_tensors(
            *[(numel, full)] * 4,
            *[(numel, half)] * 4,
            (numel, torch.int16),
            *[(numel, byte)] * 3,
            (2 * minifloat.blocks_numel(0, numel), byte),
        )
        self.reset()

    def reset(self) -> None:
        """Fill with the same numbers every time."""
        generator = torch.Generator().manual_seed(0)
        self.master.normal_(0.0, 0.02, generator=generator)
        self.gradient32.normal_(0.0, 0.01, generator=generator)
        self.gradient.copy_(self.gradient32)
        self.gradient32.copy_(self.gradient)
        for tensors in self.moments().values():
            for tensor in tensors:
                tensor.zero_()
        self.scales.zero_()
        for start in range(0, self.master.numel(), CHUNK_NUMEL):
            cut = slice(start, start + CHUNK_NUMEL)
            upper, lower = minifloat.split_master(self.master[cut])
            self.master_upper[cut], self.master_low[cut] = upper, lower
        self.weight.copy_(self.master)

    def moments(self) -> dict[StateFormat, tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors of both moments in each format."""
        return {
            EXACT: (self.exp_avg, self.exp_avg_sq),
            COMPACT16: (self.exp_avg16, self.exp_avg_sq16),
            COMPACT8: (self.exp_avg8, self.exp_avg_sq8),
        }

    def segment(self, step: int, *, numel: int | None = None, state_format: StateFormat = EXACT) -> SegmentTensors:
        """Return the buffers (or their first `numel` elements) as one segment."""
        cut = slice(numel)
        master, planes = self.master, {}
        if state_format is COMPACT8:
            scales = self.scales.view(-1, 2)[: minifloat.blocks_numel(0, self.master[cut].numel())]
            master, planes = self.master_upper, {"master_low": self.master_low[cut], "scales": scales}
        return SegmentTensors(
            master[cut],
            [moment[cut] for moment in self.moments()[state_format]],
            self.gradient[cut],
            self.weight[cut],
            FLAGS,
            reference.scalars(step, decoupled=True, grad_scale=GRAD_SCALE, **SETTINGS),
            state_format=state_format,
            rounding_key=int(rounding_keys(0, 0, step)[0]),
            **planes,
        )


def checked_checksum(kernel: CpuUpdateKernel, buffers: Buffers) -> str:
    """Compare the first elements with the reference, bit for bit; return a digest after three steps."""
    numel = min(buffers.master.numel(), 100_000)
    digest = hashlib.sha256()
    for state_format in FORMATS:
        buffers.reset()
        part = [buffers.segment(step, numel=numel, state_format=state_format) for step in (1, 2, 3)]
        for segment in part:
            reference.update(segment)
        expected = {name: tensor.clone() for name, tensor in part[0].tensors().items()}
        buffers.reset()
        all_of_it = [buffers.segment(step, state_format=state_format) for step in (1, 2, 3)]
        for segment in all_of_it:
            kernel.run(segment_table([segment]))
        for name, tensor in expected.items():
            # The last block of the part is not whole, so it has scales of its own.
            known = tensor[: numel // BLOCK_NUMEL] if name == SCALES else tensor[: numel - numel % BLOCK_NUMEL]
            ours = all_of_it[0].tensors()[name]
            if not torch.equal(ours[: len(known)].reshape(-1).view(torch.uint8), known.reshape(-1).view(torch.uint8)):
                raise SystemExit(f"{name} is not what the reference computes; nothing was timed")
            digest.update(memoryview(ours.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def whole_job(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, b: Buffers) -> Callable[[], None]:
    """Return what does a contender's job, its state being the shared buffers."""
    parameter.grad = b.gradient32

    def whole() -> None:
        b.gradient32.copy_(b.gradient)
        b.gradient32.mul_(GRAD_SCALE)
        optimizer.step()
        b.weight.copy_(parameter.detach())

    return whole


def torch_contender(b: Buffers, **kind: bool) -> Callable[[], None]:
    parameter = torch.nn.Parameter(b.master)
    optimizer = torch.optim.AdamW([parameter], **kind, **SETTINGS)
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}
    return whole_job(optimizer, parameter, b)


def deepspeed_contender(b: Buffers) -> Callable[[], None] | str:
    """Return what does DeepSpeed's job, or why there is none."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(b.master)
        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, fp32_optimizer_states=True, **SETTINGS)
    except ImportError as error:
        return f"not installed: {error}"
    except Exception as error:  # its native part is compiled here and now, which fails in many ways
        return f"could not be built: {type(error).__name__}: {error}"
    optimizer.state[parameter] = {"step": 3, "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}
    return whole_job(optimizer, parameter, b)


def tune(threads: int, numel: int, rounds: int) -> dict[str, Any]:
    """Measure updates at every distance of `AHEAD_BYTES`; return, for each instruction set, shares of stream.

    A share is the median over rounds, the fastest of three streams in the same round being 1.
    """
    buffers = Buffers(numel)
    tables = {kind: segment_table([buffers.segment(4, state_format=kind)]) for kind in FORMATS}
    found: dict[str, Any] = {}
    before = _native.prefetch_bytes()
    for name in instruction_sets()[1:]:
        kernel = CpuUpdateKernel(threads=threads, instruction_set=name)

        def updated(kind: StateFormat, ahead: int, kernel: CpuUpdateKernel = kernel) -> None:
            _native.set_prefetch_bytes(ahead, ahead)
            kernel.run(tables[kind])

        def streamed(kind: StateFormat, variant: StreamVariant, kernel: CpuUpdateKernel = kernel) -> None:
            kernel.stream(tables[kind], variant)

        weight, asking = StreamVariant.WEIGHT_NONTEMPORAL, StreamVariant.PREFETCH
        functions: dict[Any, Callable[[], None]] = {}
        for kind in FORMATS:
            for variant in (StreamVariant.PLAIN, weight, weight | asking):
                functions[kind, variant] = partial(streamed, kind, variant)
            for ahead in AHEAD_BYTES:
                functions[kind, f"{ahead}"] = partial(updated, kind, ahead)
        times = interleaved(functions, rounds)
        kernel.close()
        found[name] = {}
        for kind in FORMATS:
            streams = [times[key] for key in times if key[0] == kind and isinstance(key[1], StreamVariant)]
            stream = [min(seconds) for seconds in zip(*streams, strict=True)]
            found[name][kind.name] = {ahead: ratio(stream, times[kind, f"{ahead}"]) for ahead in AHEAD_BYTES}
    _native.set_prefetch_bytes(*before)
    return found


def print_row(found: dict[str, Any]) -> None:
    """Print what `tune` found, and what follows from it."""
    vendor, family = _native.processor()
    for name, formats in found.items():
        for kind, shares in formats.items():
            row = "  ".join(f"{ahead or 'none'}: {share:.3f}" for ahead, share in shares.items())
            print(f"{name}, {kind}, share of stream by bytes ahead: {row}")
        together = max(AHEAD_BYTES, key=lambda ahead: formats["exact"][ahead] + formats["compact16"][ahead])
        blocks = max(AHEAD_BYTES, key=lambda ahead: formats["compact8"][ahead])
        print(
            f'{name}: {{"{vendor}", {family}, {family}, {{{together}, {blocks}}}}},  or '
            f"OFFLOAD_PREFETCH_BYTES={together},{blocks}"
        )


def measure(run: Run) -> None:
    """Measure and report; or do what `--tune` says."""
    if run.args.tune:
        print_row(tune(run.args.threads, *((1 << 16, 2) if run.smoke else (16_000_000, 21))))
        return
    threads, numel, rounds = run.args.threads, *((1 << 16, 2) if run.smoke else (48_000_000, 21))
    torch.set_num_threads(threads)
    buffers = Buffers(numel)
    kernel = CpuUpdateKernel(threads=threads)
    run.checksums.append(checked_checksum(kernel, buffers))

    whole = segment_table([buffers.segment(4)])
    compact = {kind: segment_table([buffers.segment(4, state_format=kind)]) for kind in COMPACT_BYTES}
    one_core = CpuUpdateKernel(threads=1)
    contenders: dict[str, Callable[[], None] | str] = {
        "offload": lambda: kernel.run(whole),
        "torch_fused": torch_contender(buffers, fused=True),
        "torch_foreach": torch_contender(buffers, foreach=True),
        "deepspeed": "left out of the smoke run: its native part takes a minute to build"
        if run.smoke
        else run.missing.get("deepspeed") or deepspeed_contender(buffers),
    }
    not_run = {name: why for name, why in contenders.items() if isinstance(why, str)}
    functions: dict[str, Callable[[], object]] = {
        f"{name}/whole": job for name, job in contenders.items() if not isinstance(job, str)
    }
    weight, state = StreamVariant.WEIGHT_NONTEMPORAL, StreamVariant.STATE_NONTEMPORAL
    apart, ahead = StreamVariant.TENSOR_BY_TENSOR, StreamVariant.PREFETCH
    for variant in (StreamVariant.PLAIN, ahead, weight, weight | ahead, weight | state, weight | apart):
        kinds = [kind.name.lower() for kind in (weight, state, apart, ahead) if kind in variant and kind.name]
        label = "+".join(kinds) or "plain"
        functions[f"stream/{label}"] = partial(kernel.stream, whole, variant)
        for kind, table in compact.items():
            functions[f"stream_{kind.name}/{label}"] = partial(kernel.stream, table, variant)
    for kind, table in compact.items():
        functions[f"offload/{kind.name}"] = partial(kernel.run, table)
    small = Buffers(CACHED_NUMEL)
    for kind in FORMATS:
        row = segment_table([small.segment(4, state_format=kind)])
        functions[f"cached/{kind.name}"] = partial(one_core.run, np.repeat(row, numel // CACHED_NUMEL))

    times = interleaved(functions, rounds)
    kernel.close()
    one_core.close()
    rates = {name: numel / statistics.median(seconds) for name, seconds in times.items()}

    def fastest(kind: str) -> str:
        return max((name for name in rates if name.startswith(f"{kind}/")), key=rates.__getitem__)

    def faster(ours: str, theirs: str) -> float:
        return ratio(times[theirs], times[ours])

    def compared(kind: StateFormat) -> dict[str, Any]:
        name = kind.name
        ours, its_stream = f"offload/{name}", fastest(f"stream_{name}")
        return {
            "fastest_stream": its_stream,
            "bytes_per_s": rates[its_stream] * COMPACT_BYTES[kind],
            "parameters_per_s_a_core": rates[ours] / threads,
            "share_of_stream": faster(ours, its_stream),
            "share_of_cached": faster(ours, f"cached/{name}") / threads,
            "times_exact": faster(ours, "offload/whole"),
        }

    stream = fastest("stream")
    results = run.results
    results |= {
        "numel": numel,
        "rounds": rounds,
        "threads": threads,
        "instruction_set": kernel.instruction_set,
        "stream": {"fastest": stream, "bytes_per_s": rates[stream] * BYTES_PER_PARAMETER},
        **{kind.name: compared(kind) for kind in COMPACT_BYTES},
        "contenders": {
            name: {"parameters_per_s": rates[name], "share_of_stream": faster(name, stream), "seconds": seconds}
            for name, seconds in times.items()
        },
        "not_run": not_run,
    }
    print(f"{numel} parameters, {threads} threads, {kernel.instruction_set}, 100% is {stream}")
    for name, row in results["contenders"].items():
        show(name, row, "parameters_per_s", "share_of_stream")
    for kind in COMPACT_BYTES:
        show(kind.name, results[kind.name], *results[kind.name])
    for name, reason in not_run.items():
        print(f"  {name:46} not run: {reason}")
    run.at_least("whole job, share of stream", faster("offload/whole", stream), 0.95)
    others = {"torch fused": 1.5, "DeepSpeed CPU Adam": 1.2, "torch foreach": 8.0}
    for (name, least), other in zip(others.items(), ("torch_fused", "deepspeed", "torch_foreach"), strict=True):
        why = not_run.get(other, "")
        value = None if why else faster("offload/whole", f"{other}/whole")
        run.at_least(f"whole job, times {name}", value, least, why)
    for kind in COMPACT_BYTES:
        slower = max(results[kind.name][name] for name in ("share_of_stream", "share_of_cached"))
        what = f"{kind.name}, share of the slower of its stream and its update in the cache"
        run.at_least(what, slower, 0.9)


OPTIONS = (
    Option("threads", cores(), help="worker threads, for every contender"),
    Option("tune", False, help="measure how far ahead memory is best asked for"),
)


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, needs=lambda args: {} if args.tune else {"deepspeed": NATIVE})
