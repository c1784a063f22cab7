"""Random training programs beside a plain loop: weights and state have the loop's bits, whatever a program does.

    python tests/e2e/state_programs.py --programs 500 [--seed 0] [--report FILE] [--shrink]

A program trains random subsets of a few parameters, freezes and thaws them, swaps weights out and back in, changes
some of their elements, saves and resumes, loads state dicts, resets, parks, and has somebody else fill its path.
`Loop` is what has to come out: the contract in plain torch, over the kernels' reference, which defines an update's
bits. It shares nothing else with the package.

A report goes on where it was stopped. `--shrink` drops actions of a program while it still fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
import logging
import math
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gradient_programs import Program
from mirror import same_bits

import offload
from offload.engine.tables import number_of
from offload.kernels import reference

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from full_disk import mounted
from layers import Layer

SHAPES = ((64, 72), (7,), (3000,), (96, 50), (1,), (130, 9))
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
MOMENTS = ("exp_avg", "exp_avg_sq")
SEED = 7
FORMATS = {"exact": reference.EXACT, "compact16": reference.COMPACT16, "compact8": reference.COMPACT8}
TAKES_ROOM = {"save", "resume", "dict", "park", "thaw"}
"""What takes room on the paths: before it, whoever filled one has gone."""


# What has to come out


@dataclass
class Entry:
    """One parameter's state: its updates, and its tensors as the format stores them."""

    segment: reference.SegmentTensors
    step: int = 0


class Loop:
    """A plain training loop: weights, gradients, and the state of each parameter that has been updated.

    The contract: a weight that somebody has changed counts element by element, where it is not what its master rounds
    to; this is decided at the next update, and shown until then. Moments stay. What has no state begins anew.
    """

    def __init__(self, weights: list[torch.Tensor], groups: list[dict[str, Any]], form: str) -> None:
        self.weights, self.groups, self.form = weights, groups, form
        self.gradients: dict[int, torch.Tensor] = {}
        self.state: dict[int, Entry] = {}

    def fresh(self, number: int) -> Entry:
        weight = self.weights[number]
        numel, is_master = weight.numel(), weight.dtype is torch.float32
        form = "exact" if self.form == "compact8" and (numel < 4096 or weight.dim() < 2) else self.form
        planes = form == "compact8" and not is_master
        kind = {"exact": torch.float32, "compact16": torch.bfloat16, "compact8": torch.uint8}[form]
        segment = reference.SegmentTensors(
            master=torch.zeros(numel, dtype=torch.int16 if planes else torch.float32),
            state=[torch.zeros(numel, dtype=kind) for _ in MOMENTS],
            gradient=None,
            weight=None if is_master else torch.empty(numel, dtype=weight.dtype),
            flags=reference.SegmentFlag.ACTIVE | reference.SegmentFlag.DECOUPLED_DECAY,
            scalars=None,
            state_format=FORMATS[form],
            master_low=torch.zeros(numel, dtype=torch.uint8) if planes else None,
            scales=torch.zeros(-(-numel // 64), len(MOMENTS), dtype=torch.uint8) if form == "compact8" else None,
        )
        reference.store_master(segment, weight.reshape(-1).float())
        return Entry(segment)

    def accumulate(self, number: int, gradient: torch.Tensor) -> None:
        if number in self.gradients:
            reference.accumulate(self.gradients[number], gradient)
        else:
            self.gradients[number] = gradient.clone()

    def norm(self) -> float:
        return math.sqrt(reference.norm_sq([reference.gradient_blocks(g) for _, g in sorted(self.gradients.items())]))

    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())

    def step(self, grad_scale: float) -> None:
        for number, gradient in self.gradients.items():
            entry = self.state[number] = self.settled(number)
            entry.step += 1
            segment, group = entry.segment, self.groups[group_of(number)]
            values = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            segment.gradient = gradient.reshape(-1)
            segment.scalars = reference.scalars(entry.step, **values, decoupled=True, grad_scale=grad_scale)
            segment.rounding_key = int(reference.rounding_keys(SEED, [number_of(f"p{number}")], [entry.step])[0])
            reference.update(segment)
            updated = segment.master if segment.weight is None else segment.weight
            self.weights[number] = updated.clone().view_as(self.weights[number])
        self.gradients = {}

    def settled(self, number: int) -> Entry:
        """Return the state as it is now, given the weight; the entry itself is left as it is."""
        entry = copy.deepcopy(self.state.get(number)) or self.fresh(number)
        weight, master = self.weights[number].reshape(-1), reference.master_of(entry.segment)
        rounded = reference.round_weight(master, weight.dtype) if weight.dtype != torch.float32 else master
        whole = {2: torch.int16, 4: torch.int32}[weight.itemsize]
        stays = (rounded.view(whole) == weight.view(whole)) | (rounded.isnan() & weight.isnan())
        reference.store_master(entry.segment, torch.where(stays, master, weight.float()))
        return entry

    def shown(self, number: int) -> dict[str, torch.Tensor]:
        segment = self.settled(number).segment
        tensors = (reference.master_of(segment), *reference.state_of(segment))
        names = ("master", *MOMENTS)
        return {n: t.reshape(self.weights[number].shape) for n, t in zip(names, tensors, strict=True)}

    def loaded(self, number: int, shown: dict[str, torch.Tensor], step: int) -> Entry:
        """Return state made of what `shown` has returned."""
        entry = self.fresh(number)
        reference.store_master(entry.segment, shown["master"].reshape(-1).clone())
        reference.store_state(entry.segment, [shown[name].reshape(-1) for name in MOMENTS])
        entry.step = step
        return entry


def group_of(number: int) -> int:
    return number % 2


# Programs


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    form = rng.choice(("exact", "exact", "exact", "compact16", "compact8"))
    settings = {
        "form": form,
        "dtypes": [rng.randrange(len(DTYPES)) for _ in SHAPES],
        "scaled": rng.random() < 0.2,
        "mounted": rng.random() < 0.15,
        "frozen": [number for number in range(len(SHAPES)) if rng.random() < 0.15],
        **make_settings(rng),
    }
    kinds = {
        "pass": 10,
        "step": 9,
        "drop": 1,
        "freeze": 4,
        "thaw": 4,
        "swap": 4,
        "restore": 5,
        "some": 3,
        "save": 3,
        "resume": 3,
        "dict": 2,
        "reset": 1,
        "refresh": 1,
        "park": 1,
        "check": 5,
        "fill": 3 * settings["mounted"],
        "free": settings["mounted"],
    }
    actions: list[tuple[str, Any]] = []
    for _ in range(rng.randrange(8, 40)):
        what = rng.choices([*kinds], [*kinds.values()])[0]
        if what == "fill":  # room for a step is there from then on
            actions += [(each, make_value(rng, each)) for each in ("thaw", "pass", "step", "pass", "step")]
        actions.append((what, make_value(rng, what)))
    return Program(seed, settings, 0, actions)


def make_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings of one session."""
    return {
        "host_memory": rng.choice((0, 0, 0, 40_000, None)),
        "paths": rng.choice((1, 1, 2)),
        "subgroup_numel": rng.choice((4096, 8192, 1 << 20)),
        "overlap": rng.choice(("off", "off", "forward", "backward", "both")),
        "check": rng.random() < 0.5,
        "checkpoints_kept": rng.choice((1, 1, 2)),
    }


def make_value(rng: random.Random, what: str) -> Any:
    """Return what one action is given; whoever runs it leaves out what cannot be."""
    some = [number for number in range(len(SHAPES)) if rng.random() < 0.6]
    match what:
        case "pass":
            return rng.randrange(1 << 30), some
        case "step":
            return rng.choice((None, None, 0.5, 1e9))
        case "freeze" | "thaw":
            return [number for number in range(len(SHAPES)) if rng.random() < (0.3 if what == "freeze" else 0.7)]
        case "swap":
            return rng.randrange(1 << 30), some, rng.choice(("copy", "data", "perturb"))
        case "restore":
            return rng.choice(("copy", "copy", "data"))
        case "some":
            return rng.randrange(1 << 30), rng.randrange(len(SHAPES)), rng.choice((0.01, 0.5)), rng.random() < 0.3
        case "save":
            return rng.random() < 0.3
        case "resume" | "dict":
            frozen = [number for number in range(len(SHAPES)) if rng.random() < 0.3]
            return make_settings(rng), frozen, rng.choice(("before", "after"))
        case "reset":
            return rng.choice((None, some))
        case "refresh":
            return rng.randrange(1 << 30), some
        case "park":
            return rng.choice((False, True))
        case "check":
            return rng.choice(("state_for", "state_dict"))
        case "fill":
            return rng.choice((0, 0, 4096, 40_000))
    return None


@dataclass
class Saved:
    """What a checkpoint, or a state dict, holds."""

    weights: list[torch.Tensor]
    state: dict[int, tuple[dict[str, torch.Tensor], int]]
    folder: Path | None = None
    whole: dict[int, Entry] = field(default_factory=dict)
    """The state as it is stored, which a checkpoint keeps."""


class Session:
    """A model and its optimizer, beside the loop that does the same."""

    def __init__(self, program: Program, folder: Path, small: Path | None) -> None:
        rng = random.Random(program.seed + 1)
        generator = torch.Generator().manual_seed(program.seed)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        kinds = [DTYPES[number] for number in program.settings["dtypes"]]
        weights = [weight.to(kind) for weight, kind in zip(drawn, kinds, strict=True)]
        self.groups = [
            {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
            for lr, decay in ((rng.choice((1e-2, 1e-4)), 0.0), (1e-3, 0.1))
        ]
        self.folder, self.small, self.saves = folder, small, 0
        self.settings = program.settings
        self.form: str = program.settings["form"]
        self.scaler = offload.GradScaler("cpu", init_scale=256.0, enabled=program.settings["scaled"])
        self.scale = 256.0 if program.settings["scaled"] else 1.0
        self.saved: Saved | None = None
        self.told = Counter[str]()
        self.loop = Loop([weight.clone() for weight in weights], self.groups, self.form)
        self.open(weights, program.settings, program.settings["frozen"])

    def open(self, weights: list[torch.Tensor], settings: dict[str, Any], frozen: Iterable[int]) -> None:
        """Make a model of these weights, and an optimizer."""
        self.parameters = [torch.nn.Parameter(w.clone(), n not in frozen) for n, w in enumerate(weights)]
        self.layers = torch.nn.ModuleList(map(Layer, self.parameters))
        paths = [self.folder / f"path{number}" for number in range(settings["paths"])]
        if self.small is not None:
            paths[0] = self.small / "path"
        for path in paths:
            path.mkdir(exist_ok=True)
        config = offload.OffloadConfig(
            paths=paths,
            state_format=self.form,
            seed=SEED,
            threads=1,
            placement="cpu",
            **{name: settings[name] for name in ("host_memory", "subgroup_numel", "overlap", "checkpoints_kept")},
        )
        named = [(f"p{number}", parameter) for number, parameter in enumerate(self.parameters)]
        groups = [
            {**group, "params": [each for n, each in enumerate(named) if group_of(n) == place]}
            for place, group in enumerate(self.groups)
        ]
        self.optimizer = offload.AdamW(groups, offload=config)
        if settings["overlap"] in ("forward", "both"):
            self.optimizer.overlap_forward(self.layers, check=settings["check"])
        self.stack: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []
        self.unsettled: set[int] = set()
        self.warm = [0] * len(SHAPES)

    def close(self) -> None:
        self.free(None)
        self.optimizer.close()

    def act(self, what: str, value: Any) -> None:
        if what in TAKES_ROOM:
            self.free(None)
        self.told[what] += 1
        getattr(self, {"pass": "backward"}.get(what, what))(value)

    # Training

    def backward(self, value: Any) -> None:
        seed, numbers = value
        generator = torch.Generator().manual_seed(seed)
        for number in numbers:
            layer, parameter = self.layers[number], self.parameters[number]
            drawn = torch.randn(SHAPES[number], generator=generator)
            if not parameter.requires_grad:
                continue
            gradient = (drawn + layer()).to(parameter.dtype)
            self.scaler.scale((parameter * gradient).float().sum()).backward()
            expected = (drawn + 0.05 * self.loop.weights[number].float()).to(parameter.dtype)
            scale = torch.full_like(expected, self.scale)
            self.loop.accumulate(number, scale * expected)

    def step(self, max_norm: float | None) -> None:
        loop, factor = self.loop, 1.0
        if not loop.gradients and self.settings["scaled"]:
            return  # torch's scaler refuses a step without gradients
        self.scaler.unscale_(self.optimizer)
        if max_norm is not None:
            norm = float(self.optimizer.clip_grad_norm_(max_norm))
            expected = loop.norm() / self.scale  # added up in the order of the parameters' numbers
            near = math.isclose(norm, expected, rel_tol=1e-14) or (math.isnan(norm) and math.isnan(expected))
            assert near, f"norm {norm}, and not {expected}"
            if not norm <= max_norm:
                factor = min(1.0, max_norm / (norm + 1e-6)) if not math.isnan(norm) else math.nan
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.settings["scaled"] and not loop.is_finite():
            loop.gradients, self.scale = {}, 0.5 * self.scale
            return
        for number in loop.gradients:
            self.warm[number] += 1
        self.unsettled -= {*loop.gradients}
        loop.step(factor / self.scale)

    def drop(self, _value: Any) -> None:
        self.optimizer.zero_grad()
        self.loop.gradients = {}

    def freeze(self, numbers: list[int]) -> None:
        for number in numbers:
            self.parameters[number].requires_grad_(False)

    def thaw(self, numbers: list[int]) -> None:
        for number in numbers:
            self.parameters[number].requires_grad_(True)

    # Weights that somebody changes

    @torch.no_grad()
    def put(self, number: int, weight: torch.Tensor, how: str) -> None:
        if number in self.unsettled:
            return
        if how == "data":
            self.parameters[number].data = weight.clone()
        else:
            self.parameters[number].copy_(weight)
        self.loop.weights[number] = weight.clone()

    def swap(self, value: Any) -> None:
        """Put other weights in the place of some, or move these a little."""
        seed, numbers, how = value
        self.optimizer.finish()
        generator = torch.Generator().manual_seed(seed)
        kept = []
        for number in numbers:
            old = self.loop.weights[number]
            other = torch.randn(SHAPES[number], generator=generator)
            if how == "perturb":
                other = old.float() + 0.05 * other
            kept.append((number, old.clone(), self.parameters[number].data))
            self.put(number, other.to(old.dtype), how)
        self.stack.append(kept)

    @torch.no_grad()
    def restore(self, how: str) -> None:
        """Put back what was there before the last swap."""
        if not self.stack:
            return
        self.optimizer.finish()
        for number, old, own in self.stack.pop():
            is_whole = own.data_ptr() != self.parameters[number].data_ptr() and same_bits(own, old)
            if how == "data" and is_whole and number not in self.unsettled:
                self.parameters[number].data = own
                self.loop.weights[number] = old
            else:
                self.put(number, old, how)

    @torch.no_grad()
    def some(self, value: Any) -> None:
        """Change some elements of one weight, now and then to values of which there is something to say."""
        seed, number, share, special = value
        self.optimizer.finish()
        generator = torch.Generator().manual_seed(seed)
        weight = self.loop.weights[number].clone()
        chosen = torch.rand(weight.shape, generator=generator) < share
        drawn = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        if special:
            values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 1e-30], dtype=torch.float32)
            drawn = values[torch.randint(len(values), weight.shape, generator=generator)].to(weight.dtype)
        self.put(number, torch.where(chosen, drawn, weight), "copy")

    @torch.no_grad()
    def refresh(self, value: Any) -> None:
        """Write some weights past their version counters, and have all masters read from the weights."""
        seed, numbers = value
        self.optimizer.finish()
        generator = torch.Generator().manual_seed(seed)
        for number in numbers:
            other = torch.randn(SHAPES[number], generator=generator).to(self.parameters[number].dtype)
            self.parameters[number].data.copy_(other)
            self.loop.weights[number] = other.clone()
        self.optimizer.refresh_masters()
        self.unsettled.clear()
        for number, entry in self.loop.state.items():
            reference.store_master(entry.segment, self.loop.weights[number].reshape(-1).float())

    # State that is kept, and taken up again

    def save(self, copies: bool) -> None:
        self.saves += 1
        folder = self.folder / f"save{self.saves}"
        self.optimizer.save_checkpoint(folder, copy=copies)
        self.optimizer.wait_checkpoint()
        self.saved = self.snapshot(folder)
        # A save may settle a master or not, so nothing may be changed that tells which until the next update does.
        settled = self.saved.whole
        masters = {n: reference.master_of(entry.segment) for n, entry in self.loop.state.items()}
        self.unsettled = {n for n, m in masters.items() if not same_bits(m, reference.master_of(settled[n].segment))}
        self.stack, self.warm = [], [0] * len(SHAPES)

    def snapshot(self, folder: Path | None) -> Saved:
        loop = self.loop
        weights = [weight.clone() for weight in loop.weights]
        shown = {number: (loop.shown(number), entry.step) for number, entry in loop.state.items()}
        return Saved(weights, shown, folder, {number: loop.settled(number) for number in loop.state})

    def resume(self, value: Any) -> None:
        """Go on in a new optimizer, from the last checkpoint."""
        settings, frozen, order = value
        if self.saved is None:
            return
        self.optimizer.close()
        self.reopen(settings, frozen, order, self.saved, lambda: self.optimizer.load_checkpoint(self.saved.folder))
        self.loop.state = copy.deepcopy(self.saved.whole)

    def dict(self, value: Any) -> None:
        """Go on in a new optimizer, from a state dict."""
        settings, frozen, order = value
        saved, state_dict = self.snapshot(None), self.optimizer.state_dict()
        self.optimizer.close()
        self.reopen(settings, frozen, order, saved, lambda: self.optimizer.load_state_dict(state_dict))
        for number, (shown, step) in saved.state.items():
            if step or self.parameters[number].dtype != torch.float32:  # else there is nothing to keep
                self.loop.state[number] = self.loop.loaded(number, shown, step)

    def reopen(
        self, settings: dict[str, Any], frozen: list[int], order: str, saved: Saved, load: Callable[[], object]
    ) -> None:
        self.loop = Loop([weight.clone() for weight in saved.weights], self.groups, self.form)
        weights = [w if order == "before" else torch.zeros_like(w) for w in saved.weights]
        self.open(weights, settings, frozen)
        load()
        if order == "after":
            self.optimizer.finish()
            with torch.no_grad():
                for parameter, weight in zip(self.parameters, saved.weights, strict=True):
                    parameter.copy_(weight)

    def reset(self, numbers: list[int] | None) -> None:
        have = self.loop.state if numbers is None else [number for number in numbers if number in self.loop.state]
        self.optimizer.reset_state(None if numbers is None else [self.parameters[number] for number in have])
        for number in have:
            entry = self.loop.state[number]
            entry.step = 0
            reference.store_state(entry.segment, [torch.zeros(t.numel()) for t in entry.segment.state])

    def park(self, keep_host: bool) -> None:
        if self.loop.gradients:
            return  # it is refused
        with contextlib.suppress(offload.InfeasiblePlanError):
            self.optimizer.park(keep_host)

    # Somebody else's files

    def fill(self, left: int) -> None:
        if self.small is None or any(
            count < 2 and parameter.requires_grad for count, parameter in zip(self.warm, self.parameters, strict=True)
        ):
            return
        self.optimizer.finish()
        with open(self.small / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while (room := os.statvfs(self.small)).f_bavail * room.f_frsize > left:
                file.write(bytes(4096))
        self.told["filled"] += 1

    def free(self, _value: Any) -> None:
        if self.small is not None:
            (self.small / "filler").unlink(missing_ok=True)

    # What has to hold

    def check(self, how: str) -> None:
        self.optimizer.finish()
        for number, parameter in enumerate(self.parameters):
            assert same_bits(parameter.detach(), self.loop.weights[number]), differs(
                number, "weight", parameter.detach(), self.loop.weights[number]
            )
        entries = {}
        if how == "state_dict":
            state_dict = self.optimizer.state_dict()
            numbers = [n for place in range(2) for n in range(len(SHAPES)) if group_of(n) == place]
            entries = {numbers[key]: entry for key, entry in state_dict["state"].items()}
            extra = {number for number, entry in entries.items() if entry.get("step")} - {*self.loop.state}
            assert not extra, f"state of {extra}, which were never updated"
        steps = {parameter: int(entry["step"]) for parameter, entry in self.optimizer.state.items()}
        for number, expected in self.loop.state.items():
            step = steps.get(self.parameters[number], 0)
            assert step == expected.step, f"p{number} has had {step} updates, and not {expected.step}"
            shown = self.loop.shown(number)
            if how == "state_dict":
                if expected.step == 0:  # reset: its master alone
                    shown = {"master": shown["master"]}
                if self.parameters[number].dtype == torch.float32:
                    del shown["master"]  # the weight itself
                assert number in entries or not shown, f"p{number} is not in state_dict"
                found = entries.get(number, {})
            else:
                found = self.optimizer.state_for(self.parameters[number])
            for name, tensor in shown.items():
                assert name in found, f"p{number} has no {name}"
                assert same_bits(found[name], tensor), differs(number, name, found[name], tensor)


def differs(number: int, name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    apart = (found.double() - expected.double()).abs()
    count = int(((found != expected) & ~(found.isnan() & expected.isnan())).sum())
    most = float(apart.max())
    return f"{name} of p{number} ({found.dtype}) differs in {count} of {found.numel()}, by up to {most:.3g}"


# Running them


def run(program: Program, folder: Path) -> Counter[str]:
    """Run one program; return how often it did what.

    Raises:
        AssertionError: Something differs from the loop.
    """
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as ends:
        small = None
        if program.settings["mounted"]:
            with contextlib.suppress(OSError):
                small = ends.enter_context(mounted("tmpfs", folder))
        session = Session(program, folder, small)
        try:
            for action in (*program.actions, ("check", "state_for"), ("check", "state_dict")):
                try:
                    session.act(*action)
                except Exception as error:
                    error.add_note(f"seed {program.seed}: {action}")
                    raise
        finally:
            session.close()
            gc.collect()
    return session.told


def fails(program: Program, told: Counter[str] | None = None) -> str | None:
    """Return what is wrong with a program, or None; count what it did in `told`."""
    with tempfile.TemporaryDirectory(prefix="state-programs-") as folder:
        try:
            done = run(program, Path(folder) / "of")
            if told is not None:
                told.update(done)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            notes = "; ".join(getattr(error, "__notes__", ()))
            return f"{type(error).__name__}: {error} ({notes}) [{Path(where.filename).name}:{where.lineno}]"
    return None


def shrink(program: Program) -> Program:
    """Drop actions, and simplify settings, while the program fails."""
    size = max(1, len(program.actions) // 2)
    while size:
        at = 0
        while at < len(program.actions):
            shorter = dataclasses.replace(program, actions=program.actions[:at] + program.actions[at + size :])
            if fails(shorter):
                program = shorter
            else:
                at += size
        size //= 2
    plain = {"overlap": "off", "paths": 1, "scaled": False, "mounted": False, "frozen": [], "form": "exact"}
    for name, value in plain.items():
        simpler = dataclasses.replace(program, settings={**program.settings, name: value})
        if fails(simpler):
            program = simpler
    return program


def main() -> int:
    """Run programs; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--report", type=Path, help="a JSON file of what each seed has shown")
    parser.add_argument("--shrink", action="store_true", help="drop actions of programs that fail")
    arguments = parser.parse_args()
    logging.getLogger("offload").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    report: dict[str, str | None] = {}
    told = Counter[str]()
    if arguments.report is not None and arguments.report.exists():
        report = json.loads(arguments.report.read_text())
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        if str(seed) in report:
            continue
        program = make_program(seed)
        report[str(seed)] = found = fails(program, told)
        if found is not None:
            print(f"seed {seed}: {found}", flush=True)
            if arguments.shrink:
                small = shrink(program)
                print(f"  {fails(small)}\n  {small.settings}\n  {small.actions}", flush=True)
        if arguments.report is not None:
            arguments.report.write_text(json.dumps(report, indent=0))
    failed = [seed for seed, found in report.items() if found is not None]
    print(", ".join(f"{count} {what}" for what, count in sorted(told.items())))
    print(f"{len(report)} programs, {len(failed)} failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
