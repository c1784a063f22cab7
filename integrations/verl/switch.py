"""Switching the integration on and off, and functions that then replace verl's own; verl is patched here alone.

A function that "Replaces" another is called in its place, and is given it as `original`. An optimizer "of ours" is an
`OffloadedOptimizer`; others are left to verl. A *pointer* is a dict that verl saves in place of all state of ours: it
names the folder of our checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from offload import CheckpointError, ConfigError
from offload.checkpoint.marker import Mark, Marker, mark_of
from offload.combinations import VERL_CLIPS, VERL_GENERATES
from offload.integrations import shared
from offload.integrations.shared import POINTER
from offload.optim.folders import begin_folder, end_folder

log = logging.getLogger("offload")

TESTED = ("0.9.1",)

FOLDER = "optimizer"
"""The optimizer's folder in a checkpoint of verl's."""

STEP = re.compile(r"global_step_\d+")
"""Names of the folders of steps."""

_UTILS = "verl.utils.fsdp_utils"
_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager", "FSDPCheckpointManager"

RELIED_ON: dict[str, dict[str, tuple[str, str]]] = {
    _UTILS: {"offload_fsdp_optimizer": ("optimizer", ""), "load_fsdp_optimizer": ("optimizer device_id", "")},
    ".".join(_MANAGER): {
        "__init__": ("self model optimizer", ""),
        "save_checkpoint": ("self local_path", "should_save_optimizer optimizer"),
        "load_checkpoint": ("self local_path", "should_load_optimizer optimizer"),
    },
}
"""Functions that are replaced: their first parameters, and names that their code must use; see `check_relied_on`."""

_undo = contextlib.ExitStack()
"""What `enable` has replaced; closing it twice does nothing."""


def enable(keep_host: bool = True, **sizes: Any) -> None:
    """Let verl's FSDP engines park optimizers of ours, and save their state into folders of its own.

    Call this in each process that trains, before or after verl's modules are imported. A second call replaces the
    first.

    Args:
        keep_host: Whether state stays in host memory while an optimizer is parked, up to its own `host_memory`.
        sizes: No further argument is accepted: how much state stays cannot be given in bytes.

    Raises:
        ConfigError: `keep_host` is not a bool, or the verl that is installed cannot be used; names what is missing.
    """
    global _undo
    if sizes or not isinstance(keep_host, bool):
        name, value = next(iter(sizes.items()), ("keep_host", keep_host))
        raise ConfigError(
            name, value, "nothing stays by enable(False), and what host_memory has room for by enable()"
        )
    disable()
    shared.check_relied_on("verl", "pip install verl, with what it needs", TESTED, RELIED_ON)
    utils, manager = import_module(_UTILS), getattr(import_module(_MANAGER[0]), _MANAGER[1])
    helpers: dict[str, Callable[..., None]] = {
        "offload_fsdp_optimizer": functools.partial(_park, keep_host, utils.offload_fsdp_optimizer),
        "load_fsdp_optimizer": functools.partial(_unpark, utils.load_fsdp_optimizer),
    }
    wrappers = {
        "__init__": _check_optimizer,
        "save_checkpoint": _save_checkpoint,
        "load_checkpoint": _load_checkpoint,
    }
    with contextlib.ExitStack() as undo:
        for name, helper in helpers.items():
            original = vars(utils)[name]
            undo.callback(_replace_everywhere, name, helper, original)
            _replace_everywhere(name, original, helper)
        for name, wrapper in wrappers.items():
            shared.replace(undo, manager, name, functools.partialmethod(wrapper, vars(manager)[name]))
        _undo = undo.pop_all()  # for `disable`; an error before this line has undone all replacements


def disable() -> None:
    """Undo `enable`; optimizers and checkpoints stay as they are. Idempotent."""
    _undo.close()


def _replace_everywhere(name: str, present: Any, other: Any) -> None:
    """In all modules where `name` is the function `present`, set it to `other`.

    That is the module that defines the function, and each that has imported it by `from ... import`.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is present:
            setattr(module, name, other)


def _park(keep_host: bool, original: Callable[[Any], None], optimizer: Any) -> None:
    """Replaces `offload_fsdp_optimizer`, which moves state off the GPU: park an optimizer of ours."""
    own = shared.ours(optimizer)
    if own is None:
        original(optimizer)
        return
    try:
        own.park(keep_host)
    except ConfigError as error:
        if error.field != "park":  # which says that gradients or activations still need memory
            raise
        # Workers for Tinker leave training between backward and the step, and verl moves its state all the same.
        log.info("the optimizer is not parked now: %s", error)


def _unpark(original: Callable[[Any, Any], None], optimizer: Any, device_id: Any) -> None:
    """Replaces `load_fsdp_optimizer`, which moves state back to the GPU: unpark an optimizer of ours."""
    own = shared.ours(optimizer)
    if own is None:
        original(optimizer, device_id)
    else:
        own.unpark()


def _check_optimizer(manager: Any, original: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Replaces `FSDPCheckpointManager.__init__`, which every engine gives its optimizer to: check its settings."""
    original(manager, *arguments, **options)
    own = shared.ours(manager.optimizer)
    if own is None:
        return
    if not own.keeps_grads:  # verl clips `.grad` itself, after backward
        VERL_CLIPS.refuse("keep_grads", False)
    # Refuses steps that go on into forward: verl gives the new weights to generation right after its step.
    VERL_GENERATES.check("overlap", own.config.overlap)


class _PointerWhileSaving:
    """Stands in for an optimizer of ours while verl saves: `state_dict` saves to a folder, and returns a pointer.

    Args:
        optimizer: The optimizer.
        folder: The folder to save to.
        watched: Folders of earlier checkpoints, by their names; the new one is added.
    """

    def __init__(self, optimizer: Any, folder: str, watched: dict[str, shared.WatchedFolder]) -> None:
        self.optimizer, self.folder, self.watched = optimizer, folder, watched

    def state_dict(self) -> dict[str, Any]:
        """Release checkpoints whose folders verl's rank 0 has deleted, save to the folder, return a pointer to it."""
        for folder in [folder for folder, watched in self.watched.items() if watched.is_deleted]:
            del self.watched[folder]
            shared.release(shared.ours(self.optimizer).engine, folder)
        shared.save(self.optimizer, self.folder)
        self.watched[self.folder] = shared.WatchedFolder(self.folder)
        content: dict[str, Any] = shared.pointer(self.optimizer, FOLDER, "torch")
        return content


class _PointerWhileLoading:
    """Stands in for an optimizer, ours or another, while verl loads: `load_state_dict` accepts a pointer, too.

    Args:
        optimizer: The optimizer.
        model_folder: The folder that verl loads.
        watched: Folders of earlier checkpoints, by their names; the one that is loaded is added.
    """

    def __init__(self, optimizer: Any, model_folder: str, watched: dict[str, shared.WatchedFolder]) -> None:
        self.optimizer, self.model_folder, self.watched = optimizer, model_folder, watched

    def __getattr__(self, name: str) -> Any:
        """Return all else of the optimizer."""
        return getattr(self.optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, by which verl completes a checkpoint that lacks some; {} for one of ours.

        Our checkpoints lack nothing, and our state would be slow to read.
        """
        return {} if shared.ours(self.optimizer) is not None else self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the checkpoint that a pointer names, or torch's state."""
        if POINTER not in state_dict:
            self.optimizer.load_state_dict(state_dict)
            return
        folder = os.path.join(self.model_folder, state_dict[POINTER])
        own = shared.ours(self.optimizer)
        if own is None:
            raise CheckpointError(
                f"{folder} was saved with an optimizer of offload, and this one is not: go on with optimizer_impl="
                "offload, or leave the optimizer out of checkpoint.load_contents"
            )
        own.load_checkpoint(folder)
        self.watched[folder] = shared.WatchedFolder(folder)


@contextlib.contextmanager
def _replacing_optimizer(manager: Any, stand_in: Any) -> Iterator[None]:
    """While this context lasts, `manager.optimizer` is `stand_in`."""
    optimizer, manager.optimizer = manager.optimizer, stand_in
    try:
        yield
    finally:
        manager.optimizer = optimizer


def _watched_folders_of(manager: Any) -> dict[str, shared.WatchedFolder]:
    """Return the dict of folders that a manager has saved to or loaded from, and not released; callers change it."""
    folders: dict[str, shared.WatchedFolder] = vars(manager).setdefault("offload_saved", {})
    return folders


def _save_checkpoint(
    manager: Any, original: Callable[..., None], local_path: Any, *arguments: Any, **options: Any
) -> None:
    """Replaces `FSDPCheckpointManager.save_checkpoint`: verl saves a pointer in place of our optimizer's state.

    Before that the model's folder, `local_path`, is marked as begun; afterwards it is marked as whole.
    """
    own = shared.ours(manager.optimizer)
    if own is None or local_path is None:
        original(manager, local_path, *arguments, **options)
        return
    folder = os.path.join(os.path.abspath(local_path), FOLDER)
    model_folder = os.path.dirname(folder)
    # Of a folder within a step's, such as `global_step_10/actor`, a mirror keeps both parts of the path.
    is_one_of_step = STEP.fullmatch(os.path.basename(os.path.dirname(model_folder)))
    begin_folder(model_folder, Marker(depth=2 if is_one_of_step else 1))
    with _replacing_optimizer(manager, _PointerWhileSaving(own, folder, _watched_folders_of(manager))):
        original(manager, local_path, *arguments, **options)
    end_folder(own, model_folder)


def _load_checkpoint(
    manager: Any, original: Callable[..., None], local_path: Any, *arguments: Any, **options: Any
) -> None:
    """Replaces `FSDPCheckpointManager.load_checkpoint`: refuse a folder that is not whole, and follow pointers."""
    if manager.optimizer is None or local_path is None:
        original(manager, local_path, *arguments, **options)
        return
    model_folder = os.path.abspath(local_path)
    if mark_of(model_folder) is Mark.BEGUN:
        raise CheckpointError(
            f"{model_folder} is not whole, as its save was interrupted, or is under way: load another"
        )
    with _replacing_optimizer(
        manager, _PointerWhileLoading(manager.optimizer, model_folder, _watched_folders_of(manager))
    ):
        original(manager, local_path, *arguments, **options)
