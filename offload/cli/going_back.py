"""Writes a checkpoint as torch's own optimizers load it, alone or in the file or folder of a framework.

All that is not the optimizer's (weights, schedules, random states) is copied unchanged. Torch saves a file without
the bytes of state, which are then written to their places piece by piece. The target gets its name when all is on
disk.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count, takewhile
from pathlib import Path
from typing import IO, Any

import torch

from offload.checkpoint.exchange import in_rows, kept_tensors, shape_of
from offload.checkpoint.manifest import COMMIT_NAME
from offload.checkpoint.marker import BEGUN, WHOLE
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.torch_files import bytes_of, fill, start_of, without_memory, writable, write_at
from offload.dtypes import DtypeCode
from offload.errors import CheckpointError, ConfigError, known
from offload.integrations.deepspeed import in_place
from offload.integrations.shared import KINDS, POINTER
from offload.optim.groups import torch_defaults
from offload.tiers.filesystem import replacing, sync_directory, working_in
from offload.units import format_bytes

FILES = {"transformers": "optimizer.pt", "accelerate": "optimizer.bin"}
"""The file of the (first) optimizer in a framework's folder."""

DEEPSPEED = "deepspeed"

MADE_BY = {
    "transformers": "the Trainer's folder, such as checkpoint-500",
    "accelerate": "the folder that accelerator.save_state has written",
    "lightning": "the .ckpt that Lightning's Trainer has written",
    DEEPSPEED: 'the folder of a tag that DeepSpeed has saved with the layout "in_place"',
}

PIECE_BYTES = 16 << 20
"""Bytes that are written at once: a Ctrl-C is raised between two such writes."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


@dataclass(frozen=True)
class Outcome:
    """What was written.

    Attributes:
        optimizer: Name of the checkpoint's optimizer.
        groups: Number of parameters in each group.
        step: The step after which it was taken.
        has_masters: Whether there were masters beside 16-bit weights; they are not written.
    """

    optimizer: str
    groups: list[int]
    step: int
    has_masters: bool


def export_for(framework: str, checkpoint: str, target: str, progress: Progress) -> list[Outcome]:
    """Write a checkpoint for a framework with torch's own optimizer, or for DeepSpeed without offload.

    Args:
        framework: "torch", or a key of `MADE_BY`.
        checkpoint: For torch the folder of any checkpoint; else the framework's file or folder.
        target: New file (torch, lightning) or folder.
        progress: Called as bytes are written.

    Returns:
        An outcome for each optimizer.

    Raises:
        ConfigError: The target exists already, or the checkpoint is not of this framework.
        CheckpointError: The checkpoint cannot be read, or the target not written.
    """
    out = Path(os.path.abspath(target))
    if os.path.lexists(out):
        raise ConfigError("OUT", target, "it is there already; name another")
    is_folder = framework in FILES or framework == DEEPSPEED
    if is_folder and out.resolve().is_relative_to(Path(checkpoint).resolve()):
        raise ConfigError("OUT", target, "it is in CHECKPOINT, which is copied; name one beside it")
    if not out.parent.is_dir():
        raise ConfigError("OUT", target, f"there is no folder {out.parent}; make it")
    if framework == DEEPSPEED:
        states = _frames(checkpoint)
    else:
        states = {"": _state_folder(checkpoint)} if framework == "torch" else _pointers(framework, checkpoint)
    try:
        if is_folder:
            with working_in(out.with_name(f".{out.name[:100]}.partial")) as scratch:
                return _write_folder(framework, Path(checkpoint), out, states, scratch, progress)
        (folder,) = states.values()
        return [_write_state(folder, out, _read(checkpoint, framework) if framework != "torch" else None, progress)]
    except OSError as cause:
        why = cause.args[0][0][2] if isinstance(cause, shutil.Error) else cause.strerror or cause
        raise CheckpointError(f"cannot write {out}: {why}") from cause


# Finding the state of a framework's checkpoint


def _state_folder(checkpoint: str) -> str:
    """Return the folder of the state: the path itself, or the folder that a framework's checkpoint there names."""
    if os.path.lexists(os.path.join(checkpoint, COMMIT_NAME)):
        return checkpoint
    kinds = [framework for framework, file in FILES.items() if os.path.isfile(os.path.join(checkpoint, file))]
    kinds += ["lightning"] if os.path.isfile(checkpoint) else []
    if not kinds:
        return checkpoint
    folders = [*_pointers(kinds[0], checkpoint).values()]
    if len(folders) > 1:
        allowed = f"it has several optimizers; give the folder of one: {', '.join(folders)}"
        raise ConfigError("CHECKPOINT", checkpoint, allowed)
    return folders[0]


def _pointers(framework: str, checkpoint: str) -> dict[str, str]:
    """Return the folder of each optimizer's state, by the name of the framework's file that names the folder."""
    wanted = f"give {MADE_BY[framework]}"
    if framework == "lightning":
        if not os.path.isfile(checkpoint):
            raise ConfigError("CHECKPOINT", checkpoint, wanted)
        path = os.path.realpath(checkpoint)  # `save_last="link"`
        states = _read(path, framework).get("optimizer_states")
        if not isinstance(states, list) or len(states) != 1:
            raise ConfigError("CHECKPOINT", checkpoint, f"it has no state of one optimizer; {wanted}")
        return {"": _named(framework, states[0], checkpoint, os.path.dirname(path))}
    stem, ending = os.path.splitext(FILES[framework])
    further = (f"{stem}_{number}{ending}" for number in count(1)) if framework == "accelerate" else ()
    names = takewhile(lambda name: os.path.isfile(os.path.join(checkpoint, name)), chain([FILES[framework]], further))
    files = {name: os.path.join(checkpoint, name) for name in names}
    if not files:
        raise ConfigError("CHECKPOINT", checkpoint, f"there is no {FILES[framework]} in it; {wanted}")
    contents = {name: _read(file, framework) for name, file in files.items()}
    pointers = {
        name: content for name, content in contents.items() if POINTER in content
    }  # other optimizers may be torch's
    return {
        name: _named(framework, content, files[name], checkpoint) for name, content in (pointers or contents).items()
    }


def _frames(checkpoint: str) -> dict[str, str]:
    """Return the folder of the state by the names of DeepSpeed's files, which have stubs in place of state."""
    folder = os.path.join(checkpoint, in_place.FOLDER)
    if not os.path.lexists(os.path.join(folder, COMMIT_NAME)):
        if not os.path.lexists(folder) and glob.glob(os.path.join(glob.escape(checkpoint), "*_optim_states.pt")):
            allowed = "it is in DeepSpeed's own layout already: load it as it is, with offload or without"
            raise ConfigError("CHECKPOINT", checkpoint, allowed)
        raise ConfigError(
            "CHECKPOINT", checkpoint, f"there is no whole {in_place.FOLDER} in it; give {MADE_BY[DEEPSPEED]}"
        )
    with Checkpoint(folder) as opened:
        frames = {in_place.Frame.decode(opened.extra(m.rank)).file: folder for m in opened.manifests}
    for name in frames:
        if in_place.read_stub(os.path.join(checkpoint, name)) != opened.id:
            raise CheckpointError(
                f"{name} does not go with the state in {folder}: the tag was saved again since, with another layout "
                "(load it as it is) or not to the end (load another)"
            )
    return frames


def _read(path: str, framework: str) -> dict[str, Any]:
    """Load a framework's file, with tensors mapped from it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as cause:
        hint = ""
        with contextlib.suppress(Exception):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if unsafe:
                hint = f" without {', '.join(unsafe[:3])} in it; or export the folder beside it with --for torch"
        allowed = f"give {MADE_BY[framework]}{hint}"
        raise ConfigError("CHECKPOINT", path, allowed) from cause
    return content if isinstance(content, dict) else {}


def _named(framework: str, content: Any, file: str, folder: str) -> str:
    """Return the folder of state that the content of a framework's file names; raise if it names none."""
    name = content.get(POINTER) if isinstance(content, dict) else None
    if name is None and isinstance(content, dict) and "param_groups" in content:
        allowed = "the state in it is as torch's optimizers have it: resume from it as it is"
        raise ConfigError("CHECKPOINT", file, allowed)
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ConfigError("CHECKPOINT", file, f"it names no folder of state; give {MADE_BY[framework]}")
    return os.path.join(folder, name)


# Writing a state dict of torch's optimizers


def _write_state(checkpoint: str, path: Path, around: Mapping[str, Any] | None, progress: Progress) -> Outcome:
    """Write the state dict of torch's own optimizer, as a file that is whole or not there at all.

    Args:
        around: The other content of Lightning's file; None if the state dict is all.
    """
    with Checkpoint(checkpoint) as opened:
        groups, members = _groups(opened)
        tensors = kept_tensors(opened, masters=False)
        state: dict[int, dict[str, Any]] = {}
        hollow: dict[tuple[str, str], torch.Tensor] = {}
        numbers: dict[str, int] = {}
        next_number = count()
        for group, named in zip(groups, members, strict=True):
            group["params"] = []
            for name in named:
                number = next(next_number)  # a parameter that is given twice keeps its first number, as in torch
                group["params"].append(number if name is None else numbers.setdefault(name, number))
                if name is None or numbers[name] in state:
                    continue
                step = opened.step_of(name)
                if step and group.get("momentum") != 0:  # torch's SGD without momentum keeps no state
                    state[numbers[name]] = entry = {}
                    if opened.rule_of(name).missing_step is None:  # torch's class keeps a step count
                        entry["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
                    for tensor in tensors[name]:
                        hollow[name, tensor] = without_memory(opened.full_numel(name))
                        entry[tensor] = hollow[name, tensor].reshape(shape_of(opened, name))
        whole, done = sum(tensor.nbytes for tensor in hollow.values()), 0
        content: Any = {"state": state, "param_groups": groups}
        content = content if around is None else {**around, "optimizer_states": [content]}
        with replacing(path, f".{path.name[:100]}.partial", is_new=True) as file:
            _check_room(path.parent, whole)  # after `replacing` has deleted what a killed export left
            _save_hollow(content, file)
            places = known(fill(file.name, content, hollow.values()), "a state dict that is not what was saved")
            for (name, tensor), empty in hollow.items():
                start = known(start_of(places, empty), "a tensor that is not in its file")
                for piece in in_rows(opened, name, tensor):
                    write_at(file.fileno(), piece, start)
                    start, done = start + piece.nbytes, done + piece.nbytes
                    progress("writing", done, whole)
        parameters = [p for manifest in opened.manifests for p in manifest.layout.parameters]
        has_masters = any(parameter.dtype is not DtypeCode.FLOAT32 for parameter in parameters)
        kind = str(opened.metadata["optimizer"])
        return Outcome(kind, [len(group["params"]) for group in groups], opened.step, has_masters)


def _save_hollow(content: Any, file: IO[bytes]) -> None:
    """Save with torch, without the bytes of tensors; raise the `OSError` that torch hides in a `RuntimeError`."""
    try:
        with torch.serialization.skip_data():
            torch.save(content, file)
        file.flush()
    except RuntimeError as error:
        if error.__context__ is not None:
            raise error.__context__ from None
        raise


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{format_bytes(free)} are free there, and the state takes {format_bytes(needed)}: name a target on a "
            "disk with more room"
        )


def _groups(opened: Checkpoint) -> tuple[list[dict[str, Any]], list[list[str | None]]]:
    """Return the hyperparameters and the parameters' names of all groups; None for a parameter without state."""
    metadata = opened.metadata
    kinds: Mapping[str, Any] = {kind.__name__: kind.torch_class for kind in KINDS}
    saved, kind = metadata.get("groups"), str(metadata.get("optimizer"))
    if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
        raise CheckpointError(f"{opened.path} is of no optimizer of offload: it has no parameter groups")
    if kind not in kinds:
        why = "of which torch has no one optimizer: `offload export`, without --for, writes its state by name"
        if any(opened.rule_of(name).packed_words for name in opened.names):
            why = (
                "which alone knows its tensors: load it with offload.wrap(...) of that class, and torch.save the "
                "optimizer's state_dict(), which the class loads"
            )
        raise CheckpointError(f"{opened.path} has state of {kind}, {why}")
    if metadata.get("prefix"):
        raise CheckpointError(
            f"{opened.path} was saved by {len(opened.manifests)} ranks with weights of their own, as of FSDP1 or "
            "ZeroRedundancyOptimizer: no optimizer has all of it"
        )
    defaults = torch_defaults(kinds[kind])
    groups = [{**defaults, **{name: _restored(value) for name, value in group.items()}} for group in saved]
    first = opened.manifests[0].layout.parameters
    members = metadata.get("members")
    if members is None:  # written by an older version, which did not save the positions of parameters without state
        names: list[list[str | None]] = [[] for _ in groups]
        for name in opened.names:
            part = opened.parts(name)[0]
            number = opened.manifests[part.rank].layout.parameters[part.parameter].group
            if number >= len(groups):
                raise CheckpointError(f"{opened.path} is damaged: {name} is of group {number} of {len(groups)}")
            names[number].append(name)
        return groups, names
    try:
        if any(number is not None and number < 0 for group in members for number in group):
            raise IndexError("below 0")
        named = [[None if number is None else first[number].name for number in group] for group in members]
        return groups, [named[number] for number in range(len(groups))]
    except (TypeError, LookupError) as cause:
        raise CheckpointError(f"{opened.path} is damaged: its groups have no such parameters: {cause}") from cause


def _restored(value: Any) -> Any:
    """Return a hyperparameter from JSON with its type in torch."""
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return torch.tensor(value["tensor"], dtype=torch.float32, device="cpu")
    return tuple(value) if isinstance(value, list) else value


# Files


def _write_folder(
    framework: str, folder: Path, out: Path, states: Mapping[str, str], scratch: Path, progress: Progress
) -> list[Outcome]:
    """Copy a framework's folder without our folders of state; files that named these get torch's state dicts."""
    made = scratch / "made"
    left_out = {*map(os.path.basename, states.values()), *states, BEGUN, WHOLE}
    names = [name for name in sorted(os.listdir(folder)) if name not in left_out]
    whole = sum(file.lstat().st_size for name in names for file in (folder / name, *(folder / name).rglob("*")))
    done = 0

    def copy(source: str, destination: str) -> None:
        """Copy a file to the disk, in pieces."""
        nonlocal done
        if not os.path.isfile(source):
            raise CheckpointError(f"{source} is no file, and cannot be copied")
        with open(source, "rb") as there, open(destination, "xb") as here:
            while piece := there.read(PIECE_BYTES):
                here.write(piece)
                done += len(piece)
                progress("copying", min(done, whole), whole)
            here.flush()
            os.fsync(here.fileno())

    made.mkdir()
    outcomes = []
    for rank, (file, state_folder) in enumerate(states.items()):
        if framework == DEEPSPEED:
            outcomes.append(_write_frame(state_folder, rank, made / file, progress))
            continue
        outcomes.append(_write_state(state_folder, made / file, None, progress))
    for name in names:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, made / name, copy_function=copy)
        else:
            copy(str(folder / name), str(made / name))
    for directory, _, _ in os.walk(made):
        sync_directory(Path(directory))
    os.rename(made, out)  # fails if the target has been made meanwhile
    sync_directory(out.parent)
    return outcomes


def _write_frame(folder: str, rank: int, path: Path, progress: Progress) -> Outcome:
    """Write a rank's file in DeepSpeed's own layout, with its state."""
    with Checkpoint(folder) as opened:
        manifest = opened.manifests[rank]
        frame, pieces = in_place.Frame.decode(opened.extra(rank)), manifest.layout.parameters
        frame.write(str(path))
        whole, done = sum(piece.numel for piece in pieces) * 12, 0
        with writable(str(path)) as file:

            def take(number: int, first: int, views: Mapping[str, torch.Tensor]) -> None:
                nonlocal done
                for name, start in frame.pieces[pieces[number].name].items():
                    write_at(file, bytes_of(views[name]), start + first * views[name].itemsize)
                    done += views[name].nbytes
                progress("writing", done, whole)

            opened.read_pieces(pieces, take)
            os.fsync(file)
        return Outcome(f"rank {rank}'s AdamW", [len(pieces)], manifest.step, has_masters=False)
