"""Random training programs beside a plain loop: weights and state have the loop's bits, whatever a program does.

    python tests/programs.py --programs 5000 [--from 0] [--kills | --full] [--report FILE]

A program is settings and actions, drawn from a seed: it trains parts of a model, freezes and thaws, adds parameters,
changes gradients, weights, state and hyperparameters behind the optimizer's back, clips, scales, skips, saves and
goes on elsewhere with other settings, parks, loses its paths, and has somebody else fill them. `loop.py` says what
has to come out. With `--kills` it is also killed as it saves, or at any time, and taken up with other settings. With
`--full` its path, its checkpoints or both lie on a file system that fills up whatever it does: errors that are
promised may come, and it goes on from the newest checkpoint.

A program that fails is made smaller, and printed as a test. A report goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loop import Loop, Snapshot, Stored, Tensors, are_same
from mounts import mounted
from program_models import FAILS, WAYS, Net
from settling import settle
from world import SimulatedDevice

import offload
from offload.engine.tables import number_of
from offload.kernels import reference
from offload.kernels.reference import minifloat

sys.path += [str(Path(__file__).parent / name) for name in ("e2e", "faults")]
from histories import kill_at, prepare
from simulated import OnDevice, OnDeviceAdam

SEED = 7
ROOM = 1 << 24
SMALL, SMALL_BYTES = ("tmpfs", "ext4"), 8 << 20
"""File systems that fill up."""
SHAPES = ((64, 72), (7,), (3000,), (96, 50), (1,), (130, 9), (), (0, 4), (5000,), (70, 64))
TYPES = ("bfloat16", "bfloat16", "float16", "float32")
OPTIMIZERS = {
    "adamw": offload.AdamW,
    "adam": offload.Adam,
    "lion": offload.Lion,
    "adagrad": offload.Adagrad,
    "sgd": offload.SGD,
}
ON_DEVICE = {"adamw": OnDevice, "adam": OnDeviceAdam}
ADAM = {"betas": ((0.9, 0.99), (0.0, 0.999), (0.8, 0.5)), "eps": (1e-8, 1e-3), "maximize": (False, False, True)}
MORE: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": ADAM,
    "adam": ADAM,
    "lion": {"betas": ((0.9, 0.99), (0.8, 0.9)), "maximize": (False, True)},
    "adagrad": {"eps": (1e-10, 1e-3), "lr_decay": (0.1, 0.0), "maximize": (False, True)},
    "sgd": {"momentum": (0.9, 0.0), "dampening": (0.0, 0.3), "nesterov": (False,), "maximize": (False, True)},
}
"""Hyperparameters beside the rate and the decay, the plainest value first."""

SESSION: dict[str, Any] = {
    "form": "exact",
    "host_memory": None,
    "paths": 1,
    "subgroup_numel": 4096,
    "slots": None,
    "overlap": "off",
    "check": False,
    "told": False,
    "checkpoints_kept": 1,
    "gradient_memory": None,
    "gradient_dtype": "parameter",
    "threads": 1,
    "io_backend": "auto",
    "depth": None,
    "seed": SEED,
    "checksum": True,
    "activations": None,
    "device": None,
    "weights": "memory",
    "mirror": False,
}
"""Settings of one session, as simple as can be."""
PLAIN: dict[str, Any] = {
    "kinds": [((64, 72), "bfloat16"), ((3000,), "float32")],
    "rule": "adamw",
    "rates": (1e-2, 1e-3),
    "more": {},
    "body": None,
    "rows": 16,
    "scaler": None,
    "small": None,
    "breaks": False,
    "frozen": (0, 0.0),
    **SESSION,
}
OTHERS = ["pass", "pass", "step", "drop", "write", "freeze", "thaw", "thaw", "swap", "restore", "restore", "some"]
OTHERS += [
    "refresh",
    "save",
    "save",
    "resume",
    "load",
    "dict",
    "reset",
    "state",
    "rate",
    "add",
    "park",
    "park",
    "park",
]
OTHERS += ["unpark", "read", "check", "check", "lose"]
"""What is drawn beside iterations, as often as it stands here."""
TAKES_ROOM = {"save", "resume", "dict", "load", "park", "thaw", "add", "kill", "lose"}
"""What takes room on the paths: before it, whoever filled one has gone."""


@dataclass
class Program:
    """What to do.

    Attributes:
        seed: Of weights.
        settings: Those that differ from `PLAIN`.
        actions: Names of methods of `Session`, and what each is given.
        kills: Whether it lives in processes of its own, which "kill" and "die" end. What runs it has had no session.
    """

    seed: int
    settings: dict[str, Any]
    actions: list[tuple[str, Any]]
    kills: bool = False

    def __str__(self) -> str:
        settings = {name: value for name, value in self.settings.items() if value != PLAIN[name]}
        lines = [f"def test_program_{self.seed}(tmp_path: Path) -> None:", f"    settings = {settings}"]
        lines += ["    actions: list[Any] = [", *(f"        {action}," for action in self.actions), "    ]"]
        more = ", kills=True" if self.kills else ""
        call = f"programs.run(programs.Program({self.seed}, settings, actions{more}), tmp_path / 'of')"
        return "\n".join([*lines, f"    {call}"])


# Drawing them


def make_program(seed: int, kills: bool = False) -> Program:
    """Draw a program."""
    rng = random.Random(seed)
    scaler = rng.choice((None, None, None, None, "ours", "torch"))
    body = rng.choice((None, None, None, "float32", "bfloat16"))
    count = rng.choice((2, 4, 6)) if body is None else 2
    rule = rng.choice(("adamw", "adamw", "adamw", "adamw", "adam", "lion", "adagrad", "sgd"))
    settings = {
        "kinds": [make_value(rng, "add", {"scaler": scaler}) for _ in range(count)],
        "rule": rule,
        "rates": (rng.choice((1e-2, 0.1, 1e-4)), 1e-3),
        "more": {name: rng.choice(values) for name, values in MORE[rule].items()},
        "body": body,
        "rows": rng.choice((16, 64, 300, 300)),
        "scaler": scaler,
        "small": ("tmpfs", "path") if (body is None and rng.random() < 0.15) or seed % 5 == 0 else None,
        "frozen": (rng.randrange(1 << 30), rng.choice((0.0, 0.0, 0.3))),
    }
    settings |= make_session(rng, settings)
    kinds = [*OTHERS, *(["kill"] * 4 + ["die"] * 6 if kills else [])]
    actions: list[tuple[str, Any]] = []

    def draw(what: str) -> None:
        actions.append((what, make_value(rng, what, settings)))

    for _ in range(rng.randrange(4, 22)):
        if rng.random() < 0.5:  # what everybody does
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                draw("pass")
                if rng.random() < 0.15:
                    draw("write")
            draw("step")
            continue
        what = rng.choice(kinds)
        if what == "lose":
            actions.append(("save", (False, False)))
        draw(what)
        for each in ("pass", "step", "save") * 4 if what == "die" else ():
            draw(each)
    if settings["small"]:
        rng = random.Random(-1 - seed)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(actions) + 1)
            actions[at:at] = make_crowd(rng, body is not None)
    return Program(seed, settings, actions, kills)


def make_crowd(rng: random.Random, has_body: bool) -> list[tuple[str, Any]]:
    """Draw steps beside which somebody else takes the room on a path, or gives it back; amid backward, too."""

    def fill() -> tuple[str, Any]:
        return "fill", (rng.choice((0, 0, 4096, 40_000)), rng.random() < 0.3)

    step: list[tuple[str, Any]] = [
        ("pass", (rng.randrange(1 << 30), [*range(9)], "plain" if has_body else "", False)),
        ("step", (rng.choice((None, None, 0.05)), "ours")),
    ]
    found = [("thaw", (0, 1.0)), *step, *step, fill()]  # room for a step is there after two
    for _ in range(rng.randrange(2, 6)):
        found += [*step, rng.choice((fill(), fill(), ("free", 0), ("save_beside", 0)))]
    return found


FULL = {"iterate": 8, "save": 6, "wait": 2, "fill": 5, "free": 2, "load": 2, "resume": 3, "read": 1, "check": 1}
"""What is drawn of programs whose disk fills up, and how often."""


def make_full_program(seed: int) -> Program:
    """Draw a program during which somebody else takes the room of its path or checkpoints, and gives it back."""
    program, rng = make_program(seed), random.Random(-1 - seed)
    small = rng.choice(SMALL), rng.choice(("path", "saves", "all"))
    settings = {**program.settings, "small": small, "breaks": True, "host_memory": rng.choice((0, 0, 40_000))}
    settings["paths"] = rng.choice((1, 2))
    weights = {**FULL, "park": rng.choice((0, 0, 4))}
    actions: list[tuple[str, Any]] = [("fill", (0, False))] if rng.random() < 0.3 else []
    for what in rng.choices([*weights], [*weights.values()], k=40):
        if what == "fill":
            actions.append((what, (rng.choice((0, 0, 4096, 40_000, 300_000, 1 << 20)), rng.random() < 0.3)))
        else:
            each = ("pass", "step") if what == "iterate" else (what,)
            actions += [(name, make_value(rng, name, settings)) for name in each]
    return Program(seed, settings, actions)


def make_session(rng: random.Random, fixed: dict[str, Any]) -> dict[str, Any]:
    """Draw the settings of one session, given those that stay."""
    numel = rng.choice((1024, 4096, 4096, 8192, 1 << 20))
    drawn = {
        "form": rng.choice(("exact", "exact", "exact", "compact16", "compact8")),
        "host_memory": rng.choice((0, 0, 0, 40_000, 100_000, None)),
        "paths": rng.choice((1, 1, 2, 4)),
        "subgroup_numel": numel,
        "slots": None,
        "overlap": rng.choice(("off", "off", "forward", "backward", "both", "auto")),
        "check": rng.random() < 0.5,
        "told": rng.random() < 0.3,
        "checkpoints_kept": rng.choice((1, 1, 2)),
        "gradient_dtype": rng.choice(("parameter", "parameter", "parameter", "float32")),
        "threads": rng.choice((1, 1, 2)),
        "io_backend": rng.choice(("auto", "auto", "threads", "asyncio")),
        "depth": rng.choice((None, None, 1, 5)),
        "checksum": rng.random() < 0.8,
    }
    if drawn["form"] != "exact" and numel < 4096:
        drawn["subgroup_numel"] = 4096
    if drawn["form"] == "exact" and numel < 1 << 20:
        drawn["slots"] = rng.choice((None, 3, 5))
    leaves = fixed["scaler"] != "torch"  # which wants gradients to be there
    if fixed["rule"] in ON_DEVICE and rng.random() < 0.3:
        device = {
            "lazy": rng.random() < 0.5,
            "placement": rng.choice(("cpu", "gpu", 0.5, "auto")),
            "gpu_memory": rng.choice((0, 40_000, "auto", "borrow")),
            "keep_grads": not leaves or rng.random() < 0.5,
        }
        if device["gpu_memory"] == "borrow":
            drawn["overlap"] = rng.choice(("off", "backward"))
        drawn["device"] = device
    if leaves and drawn["overlap"] not in ("backward", "both") and rng.random() < 0.3:
        drawn["gradient_memory"] = rng.choice((0, 0, 5000, 40_000))
        if "device" in drawn:
            drawn["device"] |= {"placement": "cpu", "gpu_memory": 0, "keep_grads": False}
    if fixed["body"] and "device" not in drawn and rng.random() < 0.6:
        drawn["activations"] = (rng.choice((1 << 20, 1 << 20, 3 << 20)), rng.choice((1, 10_000, 50_000)))
    if drawn["overlap"] not in ("backward", "both"):  # which is refused then
        drawn["weights"] = rng.choice(("memory", "memory", "file"))
    drawn["mirror"] = rng.random() < 0.3
    return drawn


def make_value(rng: random.Random, what: str, fixed: dict[str, Any]) -> Any:
    """Draw what one action is given; whoever runs it leaves out what cannot be."""
    seed, some = rng.randrange(1 << 30), (rng.randrange(1 << 30), rng.choice((0.2, 0.6, 1.0)))
    match what:
        case "pass":
            way = rng.choice(WAYS) if fixed["body"] and rng.random() < 0.8 else ""
            way = rng.choice(FAILS) if fixed["body"] and rng.random() < 0.05 else way
            share = rng.choice((1.0, 1.0, 0.7))
            return seed, [number for number in range(9) if rng.random() < share], way, rng.random() < 0.1
        case "step":
            return rng.choice((None, None, 0.05, 0.5, 1e9)), rng.choice(("ours", "ours", "ours", "torch"))
        case "drop":
            return rng.choice(("optimizer", "model"))
        case "write":
            return seed, rng.choice(("element", "sign", "other", "none", "nan"))
        case "freeze" | "refresh" | "thaw" | "state":
            return some
        case "swap":
            return some, rng.choice(("copy", "data", "perturb"))
        case "restore":
            return rng.choice(("copy", "copy", "data"))
        case "some":
            return seed, rng.choice((0.01, 0.5)), rng.random() < 0.3
        case "save":
            return rng.random() < 0.3, rng.random() < 0.5
        case "resume" | "dict" | "lose":
            session = make_session(rng, fixed)
            session["seed"] = SEED if what == "dict" else rng.choice((SEED, 99))  # a checkpoint brings its own
            return session, (some[0], rng.choice((0.0, 0.3))), rng.choice(("before", "after"))
        case "reset":
            return rng.choice((None, some))
        case "rate":
            return rng.randrange(3), rng.choice((1e-2, 1e-3, 0.0)), rng.choice((0.0, 0.1))
        case "add":
            kind = rng.choice(TYPES)
            return rng.choice(SHAPES), "float32" if fixed["scaler"] == "torch" and kind == "float16" else kind
        case "park":
            return rng.random() < 0.5, rng.random() < 0.6
        case "check":
            return rng.choice(("state_for", "state_dict"))
        case "kill":
            return rng.randrange(1, 40)
        case "die":
            return rng.choice((0.02, 0.1, 0.3)) * rng.random() + 1e-3
    return seed


def stored_as(form: str, rule: str) -> Stored:
    """Return how a format stores state, by the kernels' reference, which defines that."""

    def stored(name: str, weight: torch.Tensor, step: int | None, tensors: Tensors) -> Tensors:
        numel, random_bits = weight.numel(), None
        if form == "exact" or (form == "compact8" and (numel < 4096 or weight.dim() < 2)):
            return tensors
        if step is not None:
            key = int(reference.rounding_keys(SEED, [number_of(name)], [step])[0])
            random_bits = reference.random_bits(key, 0, numel)
        master, *state = (tensor.reshape(-1) for tensor in tensors.values())
        if form == "compact16":
            for place, values in enumerate(state):
                bits = random_bits if random_bits is None else random_bits >> 16 * place & 0xFFFF
                rounded = reference.round_to_bfloat16(values)
                rounded = rounded if bits is None else reference.round_stochastically(values, bits)
                state[place] = rounded.float()
        else:
            are_roots = [each in ("exp_avg_sq", "sum") for each in [*tensors][1:]]
            codes, scales = minifloat.encode_state(state, are_roots, 0, random_bits)
            state = minifloat.decode_state(codes, are_roots, 0, scales)
            if weight.dtype != torch.float32:
                master = minifloat.join_master(*minifloat.split_master(master, random_bits))
        return {each: t.view(weight.shape) for each, t in zip(tensors, (master, *state), strict=True)}

    return stored


def no_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


# Running them


class Session:
    """A model and its optimizer, beside the loop that does the same."""

    def __init__(self, program: Program, folder: Path, small: Path | None) -> None:
        settings = self.fixed = {**PLAIN, **program.settings}
        self.seed, self.folder, self.small, self.kills = program.seed, folder, small, program.kills
        self.full = settings["small"][1] if small is not None else ""
        self.breaks = settings["breaks"] and small is not None
        self.saves, self.saved = 0, None
        self.before: list[Snapshot | None] = []
        """What was saved before the last save, as long as that is not known to be whole."""
        self.told = Counter[str]()
        self.is_last = False
        self.free(None)
        if (folder / "kept").exists():
            self.take_up(*pickle.loads((folder / "kept").read_bytes()))
        else:
            self.begin()
            self.open(settings, settings["frozen"])

    def begin(self, snapshot: Snapshot | None = None) -> None:
        """Make the loop: from the beginning, or for what a snapshot has."""
        settings, kind = self.fixed, self.fixed["scaler"]
        self.added: list[Any] = [] if snapshot is None else [*snapshot.more["added"]]
        self.scale: float = (1.0 if kind is None else 256.0) if snapshot is None else snapshot.more["scale"]
        scalers = {"ours": offload.GradScaler, "torch": torch.amp.GradScaler}
        self.scaler: Any = None if kind is None else scalers[kind]("cpu", init_scale=self.scale)
        model = self.made()
        names, more = [name for name, _ in model.named_parameters()], self.more
        groups = [
            {"lr": lr, "weight_decay": decay, **more, "names": names[place::2]}
            for place, (lr, decay) in enumerate(zip(settings["rates"], (0.0, 0.1), strict=True))
        ]
        self.loop = Loop(model, groups if snapshot is None else copy.deepcopy(snapshot.groups), settings["rule"])

    @property
    def more(self) -> dict[str, Any]:
        plain, given = MORE[self.fixed["rule"]], self.fixed["more"]
        return {name: given.get(name, values[0]) for name, values in plain.items()}

    def made(self) -> Net:
        return Net(self.seed, [*self.fixed["kinds"], *self.added], self.fixed["body"])

    def open(self, settings: dict[str, Any], frozen: Any, order: str = "before") -> None:
        """Make a model with the loop's weights, or with none yet, and an optimizer."""
        self.settings = settings = {**SESSION, **settings}
        self.model, loop = self.made(), self.loop
        self.loop.stored = stored_as(settings["form"], self.fixed["rule"])
        frozen = {*self.chosen(frozen)}
        self.parameters = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            twin = loop.parameters[name]
            parameter.data.copy_(twin.detach() if order == "before" else torch.zeros_like(twin))
            for each in (parameter, twin):
                each.requires_grad_(name not in frozen and not name.startswith("body.frozen"))
            twin.grad_dtype = torch.float32 if settings["gradient_dtype"] == "float32" else twin.dtype
        if settings["weights"] == "file":
            offload.weights_in_file(self.model, self.folder)
        device, more = settings["device"] or {}, dict[str, Any]()
        kind = OPTIMIZERS[self.fixed["rule"]]
        self.borrows = device.get("gpu_memory") == "borrow"
        if device:
            delay_s = 0.0 if device["lazy"] else 1e-4
            self.device = more["device"] = SimulatedDevice(ROOM, seed=self.seed, lazy=device["lazy"], delay_s=delay_s)
            kind = ON_DEVICE[self.fixed["rule"]]
        self.paths = [self.folder / f"path{number}" for number in range(settings["paths"])]
        if self.full in ("path", "all"):
            self.paths[0] = self.small / "path"
        for path in (*self.paths, self.folder / "mirror"):
            path.mkdir(exist_ok=True)
        staging = settings["slots"] and 12 * settings["slots"] * settings["subgroup_numel"]
        passed = ("host_memory", "subgroup_numel", "overlap", "checkpoints_kept", "gradient_memory")
        passed += ("gradient_dtype", "threads", "io_backend", "checksum")
        config = offload.OffloadConfig(
            paths=[{"path": path, "depth": settings["depth"]} for path in self.paths],
            state_format=settings["form"],
            exact_names=(),
            seed=settings["seed"],
            staging_memory=staging,
            mirror=str(self.folder / "mirror") if settings["mirror"] else None,
            **{name: settings[name] for name in passed},
            **{name: value for name, value in device.items() if name != "lazy"},
        )
        groups = [
            {**group, "params": [(name, self.parameters[name]) for name in group["names"]]} for group in loop.groups
        ]
        for group in groups:
            del group["names"]
        self.optimizer = kind(groups, offload=config, **more)
        if settings["overlap"] in ("forward", "both") or (settings["overlap"] == "auto" and settings["check"]):
            self.optimizer.overlap_forward(self.model, check=settings["check"])
        if settings["told"]:
            self.optimizer.last_micro_step(lambda: self.is_last)
        self.stays = settings["gradient_memory"] is None and device.get("keep_grads", True)
        self.stack: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = []
        self.unsettled: set[str] = set()
        self.warm = Counter[str]()
        self.hooks: list[Any] = []

    def close(self) -> None:
        self.free(None)
        self.optimizer.close()

    def live(self, actions: list[tuple[str, Any]]) -> None:
        """Do all this, and see whether all is as it has to be."""
        for number, (what, value) in enumerate((*actions, ("check", "state_for"), ("check", "state_dict"))):
            rest = [each for each, _ in actions[number + 1 :] if each in ("pass", "step")]
            self.is_last = rest[:1] == ["step"]
            if what in TAKES_ROOM and not self.breaks:
                self.free(None)
            self.told[what] += 1
            try:
                try:
                    getattr(self, {"pass": "backward"}.get(what, what))(value)
                except offload.OffloadError as error:
                    if not self.breaks:
                        raise
                    self.failed(what, error)
            except Exception as error:
                error.add_note(f"action {number}: {what} {value}")
                raise
            if self.borrows and what != "pass":
                assert self.device.taken_bytes == 0, f"after action {number}, {what}, something is borrowed"

    def chosen(self, value: Any) -> list[str]:
        """Return the names of a share of parameters."""
        seed, share = value
        rng = random.Random(seed)
        return [name for name in self.loop.parameters if rng.random() < share]

    # Training

    def backward(self, value: Any) -> None:
        seed, numbers, way, elsewhere = value
        loop, seen = self.loop, []
        for model in (loop.model, self.model):
            mine = model is self.model

            def train(model: Any = model, mine: bool = mine) -> None:
                loss = model.loss(seed, numbers)
                scaled = self.scaler.scale if mine and self.scaler is not None else lambda loss: loss * self.scale
                if loss is not None:
                    scaled(loss).backward()
                if way and model.body is not None:
                    context = self.context if mine else contextlib.nullcontext
                    seen.append(model.body.train_on(way, seed, self.fixed["rows"], scaled, context))

            if mine and elsewhere and self.settings["device"] is None:
                in_a_thread(train)
            else:
                train()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if seen:
            same = [bool(are_same(a.view(-1), b.view(-1)).all()) for a, b in zip(*seen, strict=True)]
            assert all(same), f"of what is seen in forward {same} are as they have to be"
        if way in FAILS:
            self.drop("optimizer")
        if self.settings["overlap"] in ("backward", "both") and seed % 2 and loop.gradients:
            settle(self.optimizer.engine)
        if self.stays:
            for name, parameter in self.parameters.items():
                expected = loop.parameters[name].grad
                assert (expected is None) == (parameter.grad is None), f"whether {name} has a gradient"
                if expected is not None:
                    assert_same(f"gradient of {name}", parameter.grad, expected)

    def context(self) -> Any:
        if self.settings["activations"] is None:
            return contextlib.nullcontext()
        nbytes, least = self.settings["activations"]
        return self.optimizer.activations_on_paths(self.model, nbytes, least_bytes=least)

    def step(self, value: Any) -> None:
        max_norm, who = value
        loop, optimizer, scale, scaler = self.loop, self.optimizer, 1.0 / self.scale, self.scaler
        if scaler is not None:
            if not loop.gradients:
                return  # torch's scaler refuses a step without gradients
            scaler.unscale_(optimizer)
            if self.fixed["scaler"] == "torch":
                for gradient in loop.gradients.values():
                    gradient.mul_(scale)
                scale = 1.0
        skips = scaler is not None and not loop.is_finite()
        if max_norm is not None and who == "torch" and self.stays and self.fixed["scaler"] != "ours":
            for model in (loop.model, self.model):
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], max_norm)
        elif max_norm is not None:
            norm, expected = float(optimizer.clip_grad_norm_(max_norm)), loop.norm() * scale
            near = math.isclose(norm, expected, rel_tol=1e-12) or (math.isnan(norm) and math.isnan(expected))
            assert near, f"norm {norm}, and not {expected}"  # added up in another order
            if not norm <= max_norm:
                scale *= min(1.0, max_norm / (norm + 1e-6)) if not math.isnan(norm) else math.nan
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            self.scale *= 0.5 if skips else 1.0
        updated = [] if skips else [*loop.gradients]
        self.warm.update(updated)
        self.unsettled -= {*updated}
        if not skips:
            loop.step(scale)
        if self.settings["overlap"] in ("backward", "both"):
            metrics = optimizer.metrics()
            for each in ("confirmed", "revoked"):
                self.told[each] += metrics.get(f"speculation/{each}_bytes", 0) > 0
        self.drop("model" if who == "torch" and not skips else "optimizer")

    def drop(self, who: str) -> None:
        if who == "model" and self.stays:
            no_gradients(self.model)
        else:
            self.optimizer.zero_grad()
        self.loop.drop()

    def freeze(self, value: Any, requires: bool = False) -> None:
        for name in self.chosen(value):
            for parameters in (self.parameters, self.loop.parameters):
                parameters[name].requires_grad_(requires)

    def thaw(self, value: Any) -> None:
        self.freeze(value, True)

    def rate(self, value: Any) -> None:
        number, lr, decay = value
        number %= len(self.loop.groups)
        for group in (self.loop.groups[number], self.optimizer.param_groups[number]):
            group |= {"lr": lr, "weight_decay": decay}

    def add(self, value: Any) -> None:
        if len(self.added) == 3:
            return
        before = {*self.parameters}
        self.added.append(value)
        for model in (self.loop.model, self.model):
            model.add(*value)
        self.parameters = dict(self.model.named_parameters())
        (name,) = self.parameters.keys() - before
        if self.settings["gradient_dtype"] == "float32":
            self.loop.parameters[name].grad_dtype = torch.float32
        group = {"lr": 1e-3, "weight_decay": 0.1, **self.more}
        self.optimizer.add_param_group({**group, "params": [(name, self.parameters[name])]})
        self.loop.groups.append({**group, "names": [name]})

    # What somebody changes

    def write(self, value: Any) -> None:
        """Change a gradient, past its version counter."""
        seed, how = value
        names = [name for name, p in self.parameters.items() if p.requires_grad and p.numel()]
        if not names or not self.stays:
            return
        name = names[seed % len(names)]
        self.told[f"write {how}"] += self.loop.parameters[name].grad is not None
        for parameter in (self.parameters[name], self.loop.parameters[name]):
            gradient = parameter.grad
            if how == "other" and (self.scaler is None or self.loop.gradients):
                wide = self.settings["gradient_dtype"] == "float32"
                parameter.grad = torch.full_like(parameter, 0.125, dtype=torch.float32 if wide else None)
            elif gradient is None:
                return
            elif how == "none":
                parameter.grad = None
            elif how == "sign":
                gradient.data.neg_()
            else:
                gradient.data.view(-1)[seed % gradient.numel()] = 1.0 if how == "element" else math.nan

    @torch.no_grad()
    def put(self, name: str, weight: torch.Tensor, how: str) -> None:
        if name in self.unsettled:
            return
        if how == "data" and self.settings["weights"] == "memory":  # else it would leave its file
            self.parameters[name].data = weight.clone()
        else:
            self.parameters[name].copy_(weight)
        self.loop.parameters[name].copy_(weight)

    def swap(self, value: Any) -> None:
        """Put other weights in the place of some, or move these a little."""
        which, how = value
        self.optimizer.finish()
        generator, kept = torch.Generator().manual_seed(which[0]), []
        for name in self.chosen(which):
            old = self.loop.parameters[name].detach().clone()
            other = torch.randn(old.shape, generator=generator)
            kept.append((name, old, self.parameters[name].data))
            self.put(name, (old.float() + 0.05 * other if how == "perturb" else other).to(old.dtype), how)
        self.stack.append(kept)

    @torch.no_grad()
    def restore(self, how: str) -> None:
        """Put back what was there before the last swap."""
        if not self.stack:
            return
        self.optimizer.finish()
        for name, old, own in self.stack.pop():
            is_whole = own.data_ptr() != self.parameters[name].data_ptr() and bool(are_same(own, old).all())
            if how == "data" and is_whole and name not in self.unsettled:
                self.parameters[name].data = own
                self.loop.parameters[name].copy_(old)
            else:
                self.put(name, old, how)

    def some(self, value: Any) -> None:
        """Change some elements of one weight, now and then to values of which there is something to say."""
        seed, share, special = value
        self.optimizer.finish()
        generator, names = torch.Generator().manual_seed(seed), [*self.parameters]
        name = names[seed % len(names)]
        weight = self.loop.parameters[name].detach().clone()
        drawn = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        if special and not name.startswith("body"):
            values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 1e-30], dtype=torch.float32)
            drawn = values[torch.randint(len(values), weight.shape, generator=generator)].to(weight.dtype)
        self.put(name, torch.where(torch.rand(weight.shape, generator=generator) < share, drawn, weight), "copy")

    def refresh(self, value: Any) -> None:
        """Write some weights past their version counters, and have all masters read from the weights."""
        self.optimizer.finish()
        generator = torch.Generator().manual_seed(value[0])
        for name in self.chosen(value):
            twin = self.loop.parameters[name]
            twin.data.copy_(torch.randn(twin.shape, generator=generator))
            self.parameters[name].data.copy_(twin.detach())
        self.optimizer.refresh_masters()
        self.unsettled.clear()
        self.loop.refresh()

    def state(self, value: Any) -> None:
        """Write state that there is."""
        generator = torch.Generator().manual_seed(value[0])
        for name in self.chosen(value):
            kept = self.loop.kept.get(name)
            if kept is None or not kept.step:
                continue
            each = [*kept.tensors][1]
            values = kept.tensors[each] * torch.rand(kept.tensors[each].shape, generator=generator)
            self.optimizer.state[self.parameters[name]][each] = values
            self.loop.write(name, each, values)

    def reset(self, value: Any) -> None:
        names = [n for n in (self.loop.kept if value is None else self.chosen(value)) if n in self.loop.kept]
        self.optimizer.reset_state(None if value is None else [self.parameters[name] for name in names])
        self.loop.reset(names)

    # State that is kept, and taken up again

    def save(self, value: Any) -> None:
        copies, waits = value
        if self.small is not None:
            self.settle_saves()  # else one that found no room would be raised here
        snapshot = self.snapshot()
        snapshot.more["mirrored"] = self.settings["mirror"] and not copies
        self.keep(snapshot)
        self.saved, self.before = snapshot, [self.saved, *self.before]
        extra = {"saves": self.saves, "drawn": torch.arange(self.saves)}
        try:
            self.optimizer.save_checkpoint(self.saved.more["folder"], extra=extra, copy=copies)
            if waits:
                self.optimizer.wait_checkpoint()
                self.before = []
        finally:
            # A save may settle a master or not: until the next update nothing may be changed that tells which.
            kept, settled = self.loop.kept, self.saved.kept
            self.unsettled = {
                name
                for name, each in kept.items()
                if not bool(are_same(each.tensors["master"], settled[name].tensors["master"]).all())
            }
            self.stack, self.warm = [], Counter()

    def snapshot(self) -> Snapshot:
        self.saves += 1
        place = self.small if self.full in ("saves", "all") else self.folder
        number = self.saves % 2 if self.breaks else self.saves  # then folders are used again
        more = {"folder": place / f"save{number}", "saves": self.saves, "scale": self.scale}
        more |= {"form": self.settings["form"], "mirrored": False}
        return self.loop.snapshot(**more, added=[*self.added])

    def wait(self, _value: Any) -> None:
        self.settle_saves()

    def settle_saves(self) -> None:
        """Wait for a save that goes on; one that others have left no room is none."""
        try:
            self.optimizer.wait_checkpoint()
            self.before = []
        except offload.CheckpointError:
            if not self.told["filled"]:
                raise
            self.forget_save()

    def forget_save(self) -> None:
        if self.before:
            self.saved, *self.before = self.before
        self.told["save refused"] += 1

    def load(self, _value: Any) -> None:
        """Go on from the last checkpoint."""
        self.settle_saves()
        if self.saved is None or self.saved.more["added"] != self.added:
            return
        self.drop("optimizer")
        self.load_saved()
        self.after_load(self.saved)

    def after_load(self, snapshot: Snapshot, *, brings: bool = True) -> None:
        """Have the loop load, too, and give the weights that what was loaded does not bring."""
        self.optimizer.finish()
        self.loop.load(snapshot)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if not brings or name not in self.loop.kept:
                    parameter.copy_(self.loop.parameters[name])
        for mine, group in zip(self.optimizer.param_groups, self.loop.groups, strict=True):
            mine |= {name: value for name, value in group.items() if name != "names"}
        self.stack, self.unsettled = [], set()

    def resume(self, value: Any) -> None:
        """Go on in a new optimizer, from the last checkpoint."""
        self.settle_saves()
        if self.saved is not None:
            settings, *more = value
            if self.saved.more["form"] == "exact":  # nothing of it was rounded, so it brings no seed
                settings = {**settings, "seed": SEED}
            self.optimizer.close()
            self.reopen(settings, *more, self.saved, self.load_saved)

    def lose(self, value: Any) -> None:
        """Have the paths and the last checkpoint go, and go on in a new optimizer from its mirror."""
        self.settle_saves()
        if self.saved is None or not (self.saved.more["mirrored"] and self.settings["mirror"]):
            return
        self.optimizer.wait_mirror()
        self.optimizer.close()
        folder = self.saved.more["folder"]
        for place in (*self.paths, folder):
            shutil.rmtree(place)
        self.saved.more["folder"] = self.folder / "mirror" / folder.name
        self.keep(self.saved)
        self.told["lost"] += 1
        self.resume(value)

    def dict(self, value: Any) -> None:
        """Go on in a new optimizer, from a state dict."""
        self.settle_saves()
        saved, state_dict = self.snapshot(), self.optimizer.state_dict()
        self.optimizer.close()
        self.reopen(*value, saved, lambda: self.optimizer.load_state_dict(state_dict))

    def reopen(
        self, settings: dict[str, Any], frozen: Any, order: str, saved: Snapshot, load: Callable[[], object]
    ) -> None:
        self.begin(saved)
        with torch.no_grad():
            for name, weight in saved.weights.items():
                self.loop.parameters[name].copy_(weight)
        self.open(settings, frozen, order)
        load()
        self.after_load(saved, brings=load == self.load_saved)

    def kill(self, changes: int) -> None:
        """Save, and die at some change of the file system, or when it is done."""
        self.settle_saves()
        snapshot = self.snapshot()
        self.keep(snapshot)
        kill_at(changes)
        self.optimizer.save_checkpoint(snapshot.more["folder"])
        self.optimizer.wait_checkpoint()
        os.kill(os.getpid(), signal.SIGKILL)

    def keep(self, newest: Snapshot) -> None:
        """Note for the next life what is about to be saved, and what was before, down to one that is whole."""
        if self.kills:
            (self.folder / "kept.new").write_bytes(pickle.dumps((newest, self.saved, *self.before)))
            (self.folder / "kept.new").rename(self.folder / "kept")

    def die(self, _delay_s: float) -> None:
        """It has been arranged for when this life began."""

    def take_up(self, *saved: Snapshot | None) -> None:
        """Go on from the newest checkpoint that is whole, of which the last one is known, or from the beginning."""
        self.saves = max(self.saves, saved[0].more["saves"] if saved[0] is not None else 0)
        self.before = []
        for snapshot in saved:
            self.saved = snapshot
            if snapshot is None:
                self.begin()
                self.open(self.fixed, self.fixed["frozen"])
                return
            try:
                other = make_session(random.Random(self.saves), self.fixed)
                self.reopen(other, self.fixed["frozen"], "before", snapshot, self.load_saved)
                return
            except offload.CheckpointError:
                self.optimizer.close()
                assert snapshot is not saved[-1], "a checkpoint was lost"
            except offload.InfeasiblePlanError:
                assert self.full in ("path", "all"), "there is room"
                self.full = ""  # it is too small for what was drawn beside what is kept: go on on another disk
                self.take_up(*saved)
                return

    def load_saved(self) -> None:
        extra, saves = self.optimizer.load_checkpoint(self.saved.more["folder"]), self.saved.more["saves"]
        if self.breaks and extra["saves"] != saves:
            raise offload.CheckpointError(f"of save {saves} nothing is there")
        assert extra is None or (extra["saves"] == saves and torch.equal(extra["drawn"], torch.arange(saves)))

    def park(self, value: Any) -> None:
        keep_host, waits = value
        if not self.loop.gradients:  # else it is refused
            try:
                self.optimizer.park(keep_host, wait=waits)
                assert self.optimizer.engine.is_parked or not waits
            except offload.InfeasiblePlanError as error:
                with contextlib.suppress(offload.SessionBrokenError):
                    self.optimizer.metrics()  # goes on as it was
                    return
                raise error from None  # its engine, which was to be opened late, could not be

    def unpark(self, _value: Any) -> None:
        self.optimizer.unpark()

    # Somebody else's files

    def fill(self, value: Any) -> None:
        """Have no room left, from now on or from amid the next backward pass on."""
        left, amid = value
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        is_cold = any(self.warm[name] < 2 for name in trained)
        if self.small is None or not trained or (is_cold and not self.breaks):
            return
        if amid:
            parameter = self.parameters[trained[len(trained) // 2]]
            self.hooks.append(parameter.register_post_accumulate_grad_hook(lambda _: self.take_room(left)))
        else:
            self.take_room(left)

    def take_room(self, left: int) -> None:
        with open(self.small / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while (room := os.statvfs(self.small)).f_bavail * room.f_frsize > left:
                file.write(bytes(4096))
        self.told["filled"] += 1

    def save_beside(self, _value: Any) -> None:
        """Save while there may be no room: that alone may fail."""
        try:
            self.save((False, True))
        except offload.CheckpointError:
            self.forget_save()

    def free(self, _value: Any) -> None:
        if self.small is not None:
            (self.small / "filler").unlink(missing_ok=True)

    def failed(self, what: str, error: offload.OffloadError) -> None:
        """Require that an error is one that a full disk may bring, and go on: from a checkpoint where it ends all."""
        self.told[f"{what} failed: {type(error).__name__}"] += 1
        if what == "save" and isinstance(error, offload.CheckpointError):
            self.forget_save()
        elif what != "park" or not isinstance(error, offload.TierError):
            chain: list[BaseException] = [error]
            while (cause := chain[-1].__cause__) is not None:
                chain.append(cause)
            assert any(isinstance(each, offload.TierError | offload.PlanError) for each in chain), f"{chain!r}"
            hides = self.settings["overlap"] != "off"
            assert hides or what == "step" or not isinstance(error, offload.StepAbortedError), "a step was waited for"
            try:
                self.optimizer.close()
            except offload.StepAbortedError:
                assert hides, "a step was waited for"
            self.free(None)
            self.take_up(self.saved, *self.before)

    # What has to hold

    def read(self, seed: int) -> None:
        """Look at one parameter's state, while all else goes on."""
        if self.loop.kept:
            self.check_state([*self.loop.kept][seed % len(self.loop.kept)])

    def check_state(self, name: str) -> None:
        found = self.optimizer.state_for(self.parameters[name])
        for each, tensor in self.loop.settled(name).tensors.items():
            assert_same(f"{each} of {name}", found[each], tensor)

    def check(self, how: str) -> None:
        loop, optimizer = self.loop, self.optimizer
        optimizer.finish()
        for name, parameter in self.parameters.items():
            assert_same(f"weight of {name}", parameter.detach(), loop.parameters[name].detach())
        self.told["activations written"] += optimizer.metrics().get("activations/written_bytes", 0) > 0
        steps = {parameter: int(entry["step"]) for parameter, entry in optimizer.state.items()}
        for name, kept in loop.kept.items():
            step = steps.get(self.parameters[name], 0)
            assert step == kept.step, f"{name} has had {step} updates, and not {kept.step}"
            if how == "state_for":
                self.check_state(name)
        if how == "state_for":
            return
        names = [name for group in loop.groups for name in group["names"]]
        entries = {names[number]: entry for number, entry in optimizer.state_dict()["state"].items()}
        extra = {name for name, entry in entries.items() if entry.get("step")} - {*loop.kept}
        assert not extra, f"state of {extra}, which were never updated"
        for name, kept in loop.kept.items():
            tensors = loop.settled(name).tensors
            if kept.step == 0:  # reset: its master alone
                tensors = {"master": tensors["master"]}
            if self.parameters[name].dtype == torch.float32:
                del tensors["master"]  # the weight itself
            for each, tensor in tensors.items():
                assert_same(f"{each} of {name}, in the state dict", entries[name][each], tensor)


def assert_same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    kinds = (found.dtype, *found.shape), (expected.dtype, *expected.shape)
    assert kinds[0] == kinds[1], f"{what} is {kinds[0]}, and not {kinds[1]}"
    differ = ~are_same(found, expected)
    if bool(differ.any()):
        apart = (found.double() - expected.double()).abs()
        raise AssertionError(
            f"{what} differs in {int(differ.sum())} of {found.numel()}, by up to {float(apart.max())}"
        )


def in_a_thread(call: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def lives(actions: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Yield the actions of each process: it is killed by the last one, or at some time after the first."""
    life: list[tuple[str, Any]] = []
    for action in actions:
        if action[0] == "die":
            yield life
            life = []
        life.append(action)
        if action[0] == "kill":
            yield life
            life = []
    yield life


def live(program: Program, folder: Path, small: Path | None, actions: list[tuple[str, Any]]) -> Counter[str]:
    """Do all this in one session; leave nothing."""
    session = Session(program, folder, small)
    try:
        session.live(actions)
    except BaseException:
        with contextlib.suppress(offload.OffloadError):
            session.close()
        raise
    session.close()
    left = [] if session.saves else [file for path in session.paths for file in path.iterdir()]
    assert not left, f"files are left: {left}"
    return session.told


def live_apart(program: Program, folder: Path, small: Path | None, actions: list[tuple[str, Any]]) -> None:
    """Do all this in a process of its own, until it is killed or ends."""
    pid = os.fork()
    dies = bool(actions) and actions[0][0] == "die"
    if pid == 0:
        status = 1
        try:
            if dies:  # wherever it is, in native code, too
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, actions[0][1])
            live(program, folder, small, actions)
            status = 0
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGALRM if dies else -signal.SIGKILL, -signal.SIGKILL):
        why = folder / "error"
        raise AssertionError(why.read_text() if why.exists() else f"a process has ended with status {status}")


def small_disk(kind: str, folder: Path, nbytes: int = SMALL_BYTES) -> contextlib.AbstractContextManager[Path]:
    """A file system that is soon full; see `mounted`."""
    if kind == "tmpfs":
        return mounted(kind, folder, f"size={nbytes}")
    return mounted(kind, folder, nbytes=nbytes, made=("-m", "0", "-b", "4096", "-O", "^has_journal"))


def run(program: Program, folder: Path) -> Counter[str]:
    """Run one program; return how often it did what.

    Raises:
        AssertionError: Something differs from the loop.
    """
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as ends, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = None
        if program.settings.get("small"):
            with contextlib.suppress(OSError):
                # A body's weights, with checkpoints kept, need more; "breaks" goes on elsewhere where that lacks.
                is_large = program.settings.get("body") is not None and not program.settings.get("breaks")
                small = ends.enter_context(
                    small_disk(program.settings["small"][0], folder, (1 + is_large) * SMALL_BYTES)
                )
        if not program.kills:
            return live(program, folder, small, program.actions)
        for actions in lives(program.actions):
            live_apart(program, folder, small, actions)
        return Counter()


def fails(program: Program) -> str | None:
    """Return what is wrong with a program, or None."""
    with tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True) as folder:
        try:
            run(program, Path(folder) / "of")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            notes = "; ".join(getattr(error, "__notes__", ()))
            return f"{type(error).__name__}: {error} ({notes}) [{Path(where.filename).name}:{where.lineno}]"
    return None


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs that are a little simpler: the largest steps first."""
    actions = program.actions
    size = len(actions)
    while size := size // 2:
        for at in range(0, len(actions), size):
            yield dataclasses.replace(program, actions=actions[:at] + actions[at + size :])
    for name, value in PLAIN.items():
        if program.settings.get(name, value) != value:
            yield dataclasses.replace(program, settings={**program.settings, name: value})
    kinds = program.settings.get("kinds", PLAIN["kinds"])
    for number in range(len(kinds) if len(kinds) > 2 else 0):
        yield dataclasses.replace(
            program, settings={**program.settings, "kinds": kinds[:number] + kinds[number + 1 :]}
        )
    for number, (what, value) in enumerate(actions):
        if what in ("resume", "dict"):
            for name in value[0]:
                fewer = {key: each for key, each in value[0].items() if key != name}
                changed = (what, (fewer, *value[1:]))
                yield dataclasses.replace(program, actions=[*actions[:number], changed, *actions[number + 1 :]])


def shrink(program: Program, tries: int = 400) -> Program:
    """Make a program that fails smaller while it fails in the same way, by so many runs at most."""

    def why(program: Program) -> str:
        return (fails(program) or "").partition(":")[0]

    wanted, left = why(program), iter(range(tries))
    while wanted:
        simplest = zip(simpler(program), left, strict=False)
        smaller = next((each for each, _ in simplest if why(each) == wanted), None)
        if smaller is None:
            break
        program = smaller
    return program


def check(program: Program) -> None:
    """Run a program.

    Raises:
        AssertionError: It fails; with what is left of it when it is made smaller, as a test.
    """
    found = fails(program)
    if found is not None:
        small = shrink(program)
        raise AssertionError(f"seed {program.seed}: {found}\n{fails(small)}\n{small}")


def main() -> int:
    """Run programs; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--kills", action="store_true", help="have programs killed, too")
    parser.add_argument("--full", action="store_true", help="have disks fill up whatever programs do")
    parser.add_argument("--report", type=Path, help="a JSON file of what each seed has shown")
    arguments = parser.parse_args()
    prepare()
    report: dict[str, str | None] = {}
    if arguments.report is not None and arguments.report.exists():
        report = json.loads(arguments.report.read_text())
    for seed in range(arguments.first, arguments.first + arguments.programs):
        if str(seed) in report:
            continue
        report[str(seed)] = None
        try:
            check(make_full_program(seed) if arguments.full else make_program(seed, arguments.kills))
        except AssertionError as error:
            report[str(seed)] = str(error)
            print(error, flush=True)
        if arguments.report is not None:
            arguments.report.write_text(json.dumps(report, indent=0))
    failed = [seed for seed, found in report.items() if found is not None]
    print(f"{len(report)} programs, {len(failed)} failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
