"""Writes a checkpoint as torch's own optimizers load it, alone or in the file or folder of a framework.

A framework's own file or folder names the folder in which the engine's checkpoint has the optimizer's state. All that
is not the optimizer's (weights, schedules, random states) is copied unchanged. The optimizer's file is first saved
with holes for the bytes of state. These are then written to their places piece by piece, so that little memory is
needed. The target gets its name when all is on disk.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
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
from offload.checkpoint.torch_files import (
    bytes_of,
    fill,
    save_with_holes,
    start_of,
    without_memory,
    writable,
    write_at,
)
from offload.dtypes import DtypeCode
from offload.errors import CheckpointError, ConfigError, known
from offload.integrations.deepspeed import in_place
from offload.integrations.shared import KINDS, POINTER
from offload.optim.groups import torch_defaults
from offload.tiers.filesystem import replacing, sync_directory, working_in
from offload.units import format_bytes

FILES = {"transformers": "optimizer.pt", "accelerate": "optimizer.bin"}
"""The file of the (first) optimizer in a framework's folder. It names the folder of the state (by key `POINTER`)."""

DEEPSPEED = "deepspeed"

MADE_BY = {
    "transformers": "the Trainer's folder, such as checkpoint-500",
    "accelerate": "the folder that accelerator.save_state has written",
    "lightning": "the .ckpt that Lightning's Trainer has written",
    DEEPSPEED: 'the folder of a tag that DeepSpeed has saved with the layout "in_place"',
}
"""What is to be given as CHECKPOINT for each framework, in words of errors."""

ITEM_BYTES = 12
"""Bytes of a parameter's state in DeepSpeed's file: master and both moments in fp32."""

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
        state_folders = _folders_by_deepspeed_file(checkpoint)
    elif framework == "torch":
        state_folders = {"": _state_folder(checkpoint)}
    else:
        state_folders = _folders_by_file(framework, checkpoint)
    try:
        if is_folder:
            # Of a long name only the beginning: the temporary one is longer, and names have at most 255 bytes.
            with working_in(out.with_name(f".{out.name[:100]}.partial")) as scratch:
                return _write_folder(framework, Path(checkpoint), out, state_folders, scratch, progress)
        (state_folder,) = state_folders.values()  # torch's and Lightning's file has one optimizer
        other_content = _load_file(checkpoint, framework) if framework != "torch" else None
        return [_write_state(state_folder, out, other_content, progress)]
    except OSError as cause:
        why = cause.strerror or cause
        if isinstance(cause, shutil.Error):  # of `copytree`: a list of (source, destination, why)
            why = cause.args[0][0][2]
        raise CheckpointError(f"cannot write {out}: {why}") from cause


# Finding the state of a framework's checkpoint


def _state_folder(checkpoint: str) -> str:
    """Return the folder of the engine's checkpoint: the path itself, or the folder that a framework's file names.

    For a path that is neither it is the path, too: opening it says what is wrong.
    """
    if os.path.lexists(os.path.join(checkpoint, COMMIT_NAME)):
        return checkpoint
    frameworks = [name for name, file in FILES.items() if os.path.isfile(os.path.join(checkpoint, file))]
    if os.path.isfile(checkpoint):
        frameworks.append("lightning")
    if not frameworks:
        return checkpoint
    folders = [*_folders_by_file(frameworks[0], checkpoint).values()]  # a checkpoint is of one framework
    if len(folders) > 1:
        advice = f"it has several optimizers; give the folder of one: {', '.join(folders)}"
        raise ConfigError("CHECKPOINT", checkpoint, advice)
    return folders[0]


def _folders_by_file(framework: str, checkpoint: str) -> dict[str, str]:
    """Return the folders of the optimizers' state, each by the name of the framework's file that names the folder.

    Lightning's checkpoint is one file, whose name is left empty. Optimizers that are not ours are left out.
    """
    advice = f"give {MADE_BY[framework]}"
    if framework == "lightning":
        return {"": _state_folder_of_lightning(checkpoint, advice)}
    first = FILES[framework]
    stem, ending = os.path.splitext(first)
    # Accelerate numbers the files of further optimizers: optimizer_1.bin.
    further = (f"{stem}_{number}{ending}" for number in count(1)) if framework == "accelerate" else ()
    names = takewhile(lambda name: os.path.isfile(os.path.join(checkpoint, name)), chain([first], further))
    files = {name: os.path.join(checkpoint, name) for name in names}
    if not files:
        raise ConfigError("CHECKPOINT", checkpoint, f"there is no {first} in it; {advice}")
    contents = {name: _load_file(file, framework) for name, file in files.items()}
    ours = {name: content for name, content in contents.items() if POINTER in content}  # others may be torch's
    return {  # without any of ours, `_state_folder_in` raises for the first file, and says what it is
        name: _state_folder_in(framework, content, files[name], checkpoint)
        for name, content in (ours or contents).items()
    }


def _state_folder_of_lightning(checkpoint: str, advice: str) -> str:
    """Return the folder of state that Lightning's file names; raise `ConfigError` with `advice` if it names none."""
    if not os.path.isfile(checkpoint):
        raise ConfigError("CHECKPOINT", checkpoint, advice)
    path = os.path.realpath(checkpoint)  # Lightning's `save_last="link"` makes links; the folder is beside the file
    states = _load_file(path, "lightning").get("optimizer_states")
    if not isinstance(states, list) or len(states) != 1:
        raise ConfigError("CHECKPOINT", checkpoint, f"it has no state of one optimizer; {advice}")
    return _state_folder_in("lightning", states[0], checkpoint, os.path.dirname(path))


def _folders_by_deepspeed_file(checkpoint: str) -> dict[str, str]:
    """Return for each rank's file of DeepSpeed's, by name, the folder of the engine's checkpoint: the same for all.

    In a tag's folder with the layout "in_place" these files are stubs. Each names the checkpoint that it belongs to,
    which has to be the one that is there: if the tag was saved again since, the two do not go together.

    Raises:
        ConfigError: The folder is not of such a tag.
        CheckpointError: A stub names another checkpoint.
    """
    folder = os.path.join(checkpoint, in_place.FOLDER)
    if not os.path.lexists(os.path.join(folder, COMMIT_NAME)):
        own_layout = os.path.join(glob.escape(checkpoint), "*_optim_states.pt")
        if not os.path.lexists(folder) and glob.glob(own_layout):
            advice = "it is in DeepSpeed's own layout already: load it as it is, with offload or without"
        else:
            advice = f"there is no whole {in_place.FOLDER} in it; give {MADE_BY[DEEPSPEED]}"
        raise ConfigError("CHECKPOINT", checkpoint, advice)
    with Checkpoint(folder) as opened:
        ranks = [manifest.rank for manifest in opened.manifests]
        files = [in_place.Frame.decode(opened.extra(rank)).file for rank in ranks]
    for file in files:
        if in_place.read_stub(os.path.join(checkpoint, file)) != opened.id:
            raise CheckpointError(
                f"{file} does not go with the state in {folder}: the tag was saved again since, with another layout "
                "(load it as it is) or not to the end (load another)"
            )
    return dict.fromkeys(files, folder)


def _load_file(path: str, framework: str) -> dict[str, Any]:
    """Load a framework's file without running code in it, its tensors mapped; return {} if it holds no dict.

    Raises:
        ConfigError: Torch cannot load it. If it has objects of classes that torch does not take for safe, the error
            names some of these.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as cause:
        hint = ""
        with contextlib.suppress(Exception):  # the hint is not worth an error of its own
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if unsafe:
                hint = f" without {', '.join(unsafe[:3])} in it; or export the folder beside it with --for torch"
        raise ConfigError("CHECKPOINT", path, f"give {MADE_BY[framework]}{hint}") from cause
    return content if isinstance(content, dict) else {}


def _state_folder_in(framework: str, content: Any, file: str, folder: str) -> str:
    """Return the folder of state that a framework's file names; raise `ConfigError` if it names none.

    Args:
        framework: A key of `MADE_BY`, for errors.
        content: What the file holds.
        file: The file's path, for errors.
        folder: The folder in which the named one lies.
    """
    name = content.get(POINTER) if isinstance(content, dict) else None
    if name is None and isinstance(content, dict) and "param_groups" in content:
        advice = "the state in it is as torch's optimizers have it: resume from it as it is"
        raise ConfigError("CHECKPOINT", file, advice)
    # The name is from a file: one that leads out of `folder` is refused.
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ConfigError("CHECKPOINT", file, f"it names no folder of state; give {MADE_BY[framework]}")
    return os.path.join(folder, name)


# Writing a state dict of torch's optimizers


def _write_state(checkpoint: str, path: Path, other_content: Mapping[str, Any] | None, progress: Progress) -> Outcome:
    """Write the state dict of torch's own optimizer to a file, which gets its name once it is whole.

    Torch saves the file with holes for the bytes of all tensors. Then all tensors but the state are filled in
    (`fill`), and the state piece by piece, as it is read from the checkpoint.

    Args:
        checkpoint: Folder of the engine's checkpoint.
        path: The new file.
        other_content: The other content of Lightning's file; None if the state dict is all.
        progress: Called as state is written.
    """
    with Checkpoint(checkpoint) as opened:
        groups, names = _groups_and_names(opened)
        state, empty_tensors = _empty_state(opened, groups, names)
        total = sum(tensor.nbytes for tensor in empty_tensors.values())
        done = 0
        content: dict[str, Any] = {"state": state, "param_groups": groups}
        if other_content is not None:
            content = {**other_content, "optimizer_states": [content]}
        with replacing(path, f".{path.name[:100]}.partial", is_new=True) as file:
            _check_room(path.parent, total)  # after `replacing` has deleted what a killed export left
            _save_without_data(content, file)
            filled = fill(file.name, content, empty_tensors.values())
            places = known(filled, "a state dict that is not what was saved")
            for (name, kind), empty in empty_tensors.items():
                position = known(start_of(places, empty), "a tensor that is not in its file")
                for piece in in_rows(opened, name, kind):
                    write_at(file.fileno(), piece, position)
                    position += piece.nbytes
                    done += piece.nbytes
                    progress("writing", done, total)
        parameters = [p for manifest in opened.manifests for p in manifest.layout.parameters]
        return Outcome(
            optimizer=str(opened.metadata["optimizer"]),
            groups=[len(group["params"]) for group in groups],
            step=opened.step,
            has_masters=any(parameter.dtype is not DtypeCode.FLOAT32 for parameter in parameters),
        )


def _empty_state(
    opened: Checkpoint, groups: list[dict[str, Any]], names: list[list[str | None]]
) -> tuple[dict[int, dict[str, Any]], dict[tuple[str, str], torch.Tensor]]:
    """Return the "state" of torch's state dict, with tensors that take no memory in place of the checkpoint's.

    Args:
        opened: The checkpoint.
        groups: The parameter groups; each gets "params", the numbers of its parameters, as in torch.
        names: Names of each group's parameters; None for a parameter without state, which only has a number.

    Returns:
        The state, by the parameters' numbers; and its flat tensors without memory, by the names of parameter and
        tensor: their bytes are to be written to the file.
    """
    kept = kept_tensors(opened, masters=False)
    state: dict[int, dict[str, Any]] = {}
    empty_tensors: dict[tuple[str, str], torch.Tensor] = {}
    numbers: dict[str, int] = {}
    next_number = count()
    for group, members in zip(groups, names, strict=True):
        group["params"] = []
        for name in members:
            number = next(next_number)
            if name is not None:  # a parameter that is given twice keeps its first number, as in torch
                number = numbers.setdefault(name, number)
            group["params"].append(number)
            if name is None or number in state:
                continue
            step = opened.step_of(name)
            # Torch keeps no state of what was never updated, and its SGD none without momentum.
            if not step or group.get("momentum") == 0:
                continue
            state[number] = entry = {}
            # `missing_step` is the count to assume where a torch class keeps none, or None if the class keeps one.
            if opened.rule_of(name).missing_step is None:
                entry["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
            for kind in kept[name]:
                empty = without_memory(opened.full_numel(name))
                empty_tensors[name, kind] = empty
                entry[kind] = empty.reshape(shape_of(opened, name))
    return state, empty_tensors


def _save_without_data(content: Any, file: IO[bytes]) -> None:
    """Save with torch, with holes for the bytes of tensors.

    If the disk is full, say, torch raises a `RuntimeError` in place of the `OSError`, which is raised here.
    """
    try:
        save_with_holes(content, file)
        file.flush()
    except RuntimeError as error:
        if error.__context__ is not None:
            raise error.__context__ from None
        raise


def _check_room(folder: Path, needed: int) -> None:
    """Refuse a target whose disk has no room for the state, before any of the state is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{format_bytes(free)} are free there, and the state takes {format_bytes(needed)}: name a target on a "
            "disk with more room"
        )


def _groups_and_names(opened: Checkpoint) -> tuple[list[dict[str, Any]], list[list[str | None]]]:
    """Return a checkpoint's parameter groups: their hyperparameters, and the names of their parameters.

    The name of a parameter without state is None.

    Raises:
        CheckpointError: It is of no optimizer that torch has, of ranks with state of their own, or damaged.
    """
    metadata = opened.metadata
    kinds: Mapping[str, Any] = {kind.__name__: kind.torch_class for kind in KINDS}
    saved = metadata.get("groups")
    kind = str(metadata.get("optimizer"))
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
    groups = [{**defaults, **{name: _from_json(value) for name, value in group.items()}} for group in saved]
    members = metadata.get("members")
    if members is None:
        return groups, _names_by_group(opened, len(groups))
    # `metadata` is that of the first rank, so the numbers in it are those of its layout.
    parameters = opened.manifests[0].layout.parameters
    try:
        # A list takes negative indices, which are as wrong here as those that are too large.
        if any(number is not None and number < 0 for group in members for number in group):
            raise IndexError("below 0")
        named = [[None if number is None else parameters[number].name for number in group] for group in members]
        return groups, [named[number] for number in range(len(groups))]  # raises if there are too few
    except (TypeError, LookupError) as cause:
        raise CheckpointError(f"{opened.path} is damaged: its groups have no such parameters: {cause}") from cause


def _names_by_group(opened: Checkpoint, group_count: int) -> list[list[str | None]]:
    """Return the names of each group's parameters with state, for older checkpoints, which do not note all members.

    A parameter's group is noted in the layout of the rank that saved it.
    """
    names: list[list[str | None]] = [[] for _ in range(group_count)]
    for name in opened.names:
        part = opened.parts(name)[0]  # all pieces of a parameter are of its group
        group = opened.manifests[part.rank].layout.parameters[part.parameter].group
        if group >= group_count:
            raise CheckpointError(f"{opened.path} is damaged: {name} is of group {group} of {group_count}")
        names[group].append(name)
    return names


def _from_json(value: Any) -> Any:
    """Return a hyperparameter from JSON with its type in torch: a marked number is a tensor, a list a tuple."""
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return torch.tensor(value["tensor"], dtype=torch.float32, device="cpu")
    return tuple(value) if isinstance(value, list) else value


# Files


def _write_folder(
    framework: str, folder: Path, out: Path, state_folders: Mapping[str, str], scratch: Path, progress: Progress
) -> list[Outcome]:
    """Copy a framework's folder, with the optimizers' state in the framework's own files.

    The engine's folders are not copied. Files that named them are written anew, with the state. All is written in
    `scratch`, and renamed to `out` when it is on the disk.

    Args:
        framework: A key of `MADE_BY` whose checkpoint is a folder.
        folder: The framework's folder.
        out: The new folder.
        state_folders: The engine's folders, by the names of the files that named them; for DeepSpeed in the order of
            ranks.
        scratch: A temporary folder beside `out`.
        progress: Called as bytes are written.

    Returns:
        An outcome for each of these files.
    """
    made = scratch / "made"
    # What is not copied: folders of state, files that are written anew, and markers of whether the folder is whole.
    left_out = {*map(os.path.basename, state_folders.values()), *state_folders, BEGUN, WHOLE}
    names = [name for name in sorted(os.listdir(folder)) if name not in left_out]
    total = sum(file.lstat().st_size for name in names for file in (folder / name, *(folder / name).rglob("*")))
    done = 0

    def copy(source: str, destination: str) -> None:
        """Copy a file to the disk, in pieces; `copytree` calls this, too."""
        nonlocal done
        try:
            is_file = stat.S_ISREG(os.stat(source).st_mode)
        except FileNotFoundError:  # a link to nothing; what else is wrong with a link is raised
            is_file = False
        if not is_file:
            raise CheckpointError(f"{source} is no file, and cannot be copied")
        with open(source, "rb") as source_file, open(destination, "xb") as copied_file:
            while piece := source_file.read(PIECE_BYTES):
                copied_file.write(piece)
                done += len(piece)
                progress("copying", min(done, total), total)  # of a link, `total` has its own size, not the file's
            copied_file.flush()
            os.fsync(copied_file.fileno())

    made.mkdir()
    outcomes = []
    for rank, (file, state_folder) in enumerate(state_folders.items()):
        if framework == DEEPSPEED:
            outcomes.append(_write_deepspeed_file(state_folder, rank, made / file, progress))
        else:
            outcomes.append(_write_state(state_folder, made / file, None, progress))
    for name in names:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, made / name, copy_function=copy)
        else:
            copy(str(folder / name), str(made / name))
    for directory, _, _ in os.walk(made):
        sync_directory(Path(directory))
    os.rename(made, out)  # fails if the target has been made meanwhile, unless it is an empty folder
    sync_directory(out.parent)
    return outcomes


def _write_deepspeed_file(folder: str, rank: int, path: Path, progress: Progress) -> Outcome:
    """Write a rank's file in DeepSpeed's own layout, with its state.

    The engine's checkpoint has that file without the bytes of state, and where these belong in it: a `Frame`, the
    `extra` of the rank's manifest. The file is written with holes, which then get the state, piece by piece.

    Args:
        folder: Folder of the engine's checkpoint.
        rank: The rank that saved the file.
        path: The new file.
        progress: Called as state is written.
    """
    with Checkpoint(folder) as opened:
        manifest = opened.manifests[rank]
        parameters = manifest.layout.parameters
        frame = in_place.Frame.decode(opened.extra(rank))
        frame.write(str(path))
        total = ITEM_BYTES * sum(parameter.numel for parameter in parameters)
        done = 0
        with writable(str(path)) as file:

            def write_piece(number: int, first: int, tensors: Mapping[str, torch.Tensor]) -> None:
                """Write elements of a parameter's state, from the `first` on, to their places in the file."""
                nonlocal done
                for name, start in frame.pieces[parameters[number].name].items():
                    write_at(file, bytes_of(tensors[name]), start + first * tensors[name].itemsize)
                    done += tensors[name].nbytes
                progress("writing", done, total)

            opened.read_pieces(parameters, write_piece)
            os.fsync(file)
        return Outcome(f"rank {rank}'s AdamW", [len(parameters)], manifest.step, has_masters=False)
