"""Files of every version that ever wrote others, what today's package reads from them, and what it writes.

`files/` has an archive for each commit that changed what is written, made by `old_files.py` with its package:

    82bf003  the first checkpoints
    2510139  COMMIT says what it replaced, RELEASED what was released, a copy pins its own store
    c208eca  a manifest names the rule and the formats of its state
    dbb9fcb  ... always seed and numbers of stochastic rounding (compact16)
    f8ff276  ... these only where something is rounded so
    87b95bc  ... a state format for each subgroup (compact8)
    cba6f9b  ... a prefix of names in what the optimizer says
    6d28749  ... boxes of pieces that are no single run of their parameter
    e760b6c  which parameters each group has

and a file of rates for each that changed those: 688dd07 the first; 82bf003 the engine's reaction; dbb9fcb its calls
and operations; 87b95bc paths alone; cba6f9b format 2, a rate for each format of state; e760b6c transfers at once.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import offload
from net import old_files, seams
from net.recordings import digest

FILE = "files.json"
FILES = Path(__file__).parent / "files"
VERSIONS = ("82bf003", "2510139", "c208eca", "dbb9fcb", "f8ff276", "87b95bc", "cba6f9b", "6d28749", "e760b6c")
RATES = ("688dd07", "82bf003", "dbb9fcb", "87b95bc", "cba6f9b", "e760b6c", "d741928")
KINDS = ("exact", "Lion", "Adagrad", "SGD", "compact16", "compact8")

HEX_32 = re.compile(r"[0-9a-f]{32}")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def unpack(version: str, folder: Path) -> list[str]:
    """Unpack a version's archive; return the kinds of state in it."""
    with tarfile.open(FILES / f"{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return sorted(entry.name for entry in folder.iterdir())


def load(kind: str, folder: Path) -> dict[str, Any]:
    """Return what today's package reads from the checkpoints of a kind, and what it says of them otherwise."""
    if kind == "ranks":
        return {"ranks": _load("exact", folder / "ranks", names=("matrix",)), "verify": _verify(folder / "ranks")}
    found = {
        "replaced": _load(kind, folder / "replaced", host_memory=0, paths=[folder / "path"]),
        "copy": _load(kind, folder / "copy"),
        "verify": _verify(folder / "copy"),
    }
    if (folder / "released").exists():
        try:
            _load(kind, folder / "released")
        except offload.CheckpointError as error:
            found["released"] = _masked(str(error), folder)
    return found


def _load(kind: str, checkpoint: Path, names: tuple[str, ...] = (), **config: Any) -> dict[str, Any]:
    parameters = old_files.model(kind)
    parameters = {name: parameter for name, parameter in parameters.items() if name in names or not names}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    with old_files.optimizer_of(kind, parameters, **config) as optimizer:
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        extra = optimizer.load_checkpoint(checkpoint)
        found = {"loaded": _digests(optimizer, parameters), "extra": repr(extra)}
        steps = {name: int(optimizer.state[p]["step"]) for name, p in parameters.items()}
        groups = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
        old_files.train(optimizer, parameters, old_files.STEPS + 1, 1)
        return {**found, "steps": steps, "groups": repr(groups), "trained": _digests(optimizer, parameters)}


def _digests(optimizer: Any, parameters: dict[str, torch.nn.Parameter]) -> str:
    found = []
    for name, parameter in parameters.items():
        for part, tensor in (("weight", parameter.detach()), *sorted(optimizer.state_for(parameter).items())):
            whole = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
            found.append(f"{name} {part} {digest(tensor.contiguous().view(whole).numpy().tobytes())}")
    return digest("\n".join(found).encode())


def _verify(checkpoint: Path) -> dict[str, Any]:
    (row,) = seams.verified(checkpoint)
    return {name: value for name, value in row.items() if name != "checkpoint"}


def _masked(text: str, folder: Path) -> str:
    return UUID.sub("UUID", HEX_32.sub("ID", text.replace(str(folder.resolve()), "FOLDER")))


def write(kind: str, folder: Path) -> dict[str, Any]:
    """Have today's package write checkpoints; return all that their files say, without what no two runs share."""
    old_files.write_checkpoints(kind, folder)
    old_files.write_copy(kind, folder)
    return dict(sorted(_described(folder)))


def _described(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.rglob("*")):
        name = _masked(str(file.relative_to(folder)), folder)
        if file.is_dir():
            continue
        if name.endswith(("/tiles", ".bin", "/lock")):
            yield name, "not text"
            continue
        lines = [json.loads(line) for line in _masked(file.read_text(encoding="utf-8"), folder).splitlines()]
        for line in lines:
            for volatile in ("crc32c", "nbytes", "pid", "host"):
                if volatile in line:
                    line[volatile] = "VOLATILE"
            # A tile lies where there was room: its offset depends on which write ended first.
            line |= (
                {"tiles": [[store, "OFFSET", *row] for store, _, *row in line["tiles"]]} if "tiles" in line else {}
            )
            for inodes in {"inodes", "folder_inodes"} & line.keys():
                line[inodes] = dict.fromkeys(line[inodes], "INODE")
            if line.get("extra"):  # torch.save's bytes are torch's
                line["extra"] = [line["extra"][0], "VOLATILE", "VOLATILE"]
        yield name, [json.dumps(line) for line in lines]


def rates(version: str, folder: Path) -> dict[str, Any]:
    """Return what today's package reads from a file of rates, as it would write it; the file is written again."""
    again = folder / "again.json"
    seams.save_rates(again, seams.load_rates(FILES / f"{version}-rates.json"))
    found: dict[str, Any] = json.loads(again.read_text(encoding="utf-8"))
    return found


def facts(folder: Path) -> dict[str, list[str]]:
    """Return the names under which a file of rates has what it depends on."""
    return {name: [*found] for name, found in seams.facts(str(folder)).items()}


def observe(folder: Path) -> dict[str, Any]:
    """Return what is recorded."""
    loaded = {}
    for version in VERSIONS:
        for kind in unpack(version, folder / version):
            loaded[f"{version} {kind}"] = load(kind, folder / version / kind)
    return {
        "loaded": loaded,
        "written": {kind: write(kind, folder / "written" / kind) for kind in KINDS},
        "rates": {version: rates(version, folder) for version in RATES},
        "facts": facts(folder),
    }
