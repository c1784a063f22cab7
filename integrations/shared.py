"""What several integrations share: reading configs, patching a framework, clipping, saving, logging.

An optimizer "of ours" is an `OffloadedOptimizer`, such as `offload.AdamW`. A framework's own file has a small dict in
place of its state, the *pointer*, which names the folder of its checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import torch

import offload
from offload import ConfigError, OffloadError
from offload.combinations import CLIPPED_APART
from offload.optim.frozen import tell_little
from offload.optim.optimizer import OffloadedOptimizer

KINDS: tuple[type[torch.optim.Optimizer], ...] = (
    offload.AdamW,
    offload.Adam,
    offload.Lion,
    offload.Adagrad,
    offload.SGD,
)
"""Our optimizers whose checkpoints `offload export --for` can write as state for torch's own optimizers."""

OBJECT = "multi_tier_offload"
"""The top-level object of a DeepSpeed config that has the fields of `OffloadConfig`."""

POINTER = "offload_checkpoint"
"""The key under which a framework's own file has the name of the folder with the optimizer's state."""

WAY_BACK = (
    "the optimizer state is not in this file: `offload export CHECKPOINT --for {} OUT` makes OUT for torch.optim"
)
"""Text in the error of a torch optimizer that loads a pointer; all characters are ASCII, none is a quote."""

LOGGED = "step_s", "predicted_step_s", "resident_share"
"""Metrics that are logged with a framework's loss."""

_log = logging.getLogger("offload")


def read_fields(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the fields of an `OffloadConfig`: `config` itself if it is a mapping, else the content of a JSON file.

    Raises:
        ConfigError: The file cannot be read, or is not JSON; or the config is neither a mapping nor a path, or has
            the fields in an object, as a DeepSpeed config does.
    """
    values: Any = config if isinstance(config, Mapping) else _read_json(config)
    if isinstance(values, Mapping) and OBJECT in values:
        allowed = f"give the fields of {OBJECT} alone, as this is no DeepSpeed config"
        raise ConfigError(OBJECT, values[OBJECT], allowed)
    fields: Mapping[str, Any] = values
    return fields


def _read_json(config: Any) -> Any:
    """Return the content of the JSON file whose path is `config`; raise as `read_fields` does."""
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError("config", config, "OffloadConfig's fields, or the path of a JSON file of them")
    try:
        with open(config, encoding="utf-8") as file:
            return json.load(file)
    except OSError as cause:
        raise ConfigError("config", os.fspath(config), f"it cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise ConfigError("config", os.fspath(config), f"it is not JSON: {cause}") from cause


class AtImport(MetaPathFinder):
    """An import hook that calls a function right after a module's first import.

    Insert it at the head of `sys.meta_path`, whose finders are asked in order, while the module is not imported. It
    has the other finders find the module, and wraps the loader that they return.

    Args:
        name: The module's name.
        act: The function, called without arguments.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls `act` afterwards; None for other modules."""
        if fullname != self._name:
            return None
        other_finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in other_finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:  # a namespace package has no loader, and no code to run
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Run the module as its loader does, then act."""
                execute(module)
                self._act()

            # Set on this loader object alone, where it hides the method of the loader's class.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def check_relied_on(
    package: str, advice: str, tested: Sequence[str], relied_on: Mapping[str, Mapping[str, tuple[str, str]]]
) -> None:
    """Check that the installed framework has the functions that an integration replaces or calls.

    Args:
        package: The module that has the framework's version; errors name its first part.
        advice: How the framework is installed.
        tested: The tested versions.
        relied_on: By module or class, then by a function's name, two strings of words: the function's first
            parameters, and names that its code must use. Example: ("self local_path", "optimizer").

    Raises:
        ConfigError: The framework cannot be imported, or a function is missing or has changed; names it.
    """
    field, use = package.partition(".")[0], f"use one of {', '.join(tested)}"
    problems: list[str] = []
    try:
        version = str(getattr(import_module(package), "__version__", "without a version"))
        owners = [*map(_import_owner, relied_on)]
    except ImportError as error:
        raise ConfigError(field, f"cannot be imported: {error}", advice) from error
    except AttributeError as error:
        raise ConfigError(field, version, f"{use}: {error}") from error
    for (owner_name, functions), owner in zip(relied_on.items(), owners, strict=True):
        for name, (first_parameters, names_to_use) in functions.items():
            installed = vars(owner).get(name)  # the owner's own, which integrations replace, and no inherited one
            if installed is None:
                problems.append(f"{owner_name}.{name} is gone")
                continue
            function = inspect.unwrap(installed)  # below the framework's decorators
            actual, expected = list(inspect.signature(function).parameters), first_parameters.split()
            if actual[: len(expected)] != expected:
                problems.append(f"{owner_name}.{name}({', '.join(actual)}) took ({', '.join(expected)})")
            used_names = {*_names_in(function.__code__)}
            if unused := [word for word in names_to_use.split() if word not in used_names]:
                problems.append(f"{owner_name}.{name} does not use {', '.join(unused)}")
    if problems:
        raise ConfigError(field, version, f"{use}: {'; '.join(problems)}")
    if version not in tested:
        _log.info("%s %s has all that is relied on, but only %s is tested", package, version, ", ".join(tested))


def _import_owner(place: str) -> Any:
    """Return a module, or a class of a module, by its dotted name; the first letter of a class is a capital."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name) if name.lstrip("_")[0].isupper() else import_module(place)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function's code uses, and those of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:  # which have the code of lambdas and inner functions
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or module; closing `undo` restores what was there."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:  # inherited: once ours is deleted, the base class's shows again
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def ours(optimizer: Any) -> Any:
    """Return the optimizer of ours that `optimizer` is, or that a framework's wrapper has; None if it is another."""
    # Wrappers of Accelerate and Lightning have the wrapped optimizer as `optimizer`.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer if isinstance(optimizer, OffloadedOptimizer) else None


def find_clipping_optimizer(
    optimizers: Iterable[Any], accelerator: Any, parameters: Sequence[torch.Tensor], norm_type: float
) -> Any:
    """Return the optimizer that clips gradients of `parameters` in its own update; None if Accelerate is to clip.

    An optimizer can clip if it is the only one of `optimizers` (all ours) that updates any of these parameters; if it
    updates no others, and all of these that have a gradient; if the norm is the L2 norm; and if no scaler changes
    gradients itself.

    Raises:
        ConfigError: Neither can clip: gradients of these parameters are moved out of `.grad` during backward.
    """
    given_ids = {id(parameter) for parameter in parameters}
    updated_ids = {optimizer: _updated_ids(optimizer) for optimizer in optimizers}
    updating_optimizers = [optimizer for optimizer, ids in updated_ids.items() if not ids.isdisjoint(given_ids)]
    if len(updating_optimizers) == 1 and float(norm_type) == 2 and accelerator.scaler is None:
        ids = updated_ids[updating_optimizers[0]]
        if ids <= given_ids and all(p.grad is None or id(p) in ids for p in parameters):
            return updating_optimizers[0]
    _check_gradients_stay(updating_optimizers)
    return None


def check_clips_by_value(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> None:
    """Raise `ConfigError` if a framework cannot clip gradients of `parameters` by value, as they leave `.grad`.

    `optimizers` are ours; those that update none of these parameters do not matter.
    """
    given_ids = {id(parameter) for parameter in parameters}
    _check_gradients_stay(optimizer for optimizer in optimizers if not _updated_ids(optimizer).isdisjoint(given_ids))


def _updated_ids(optimizer: Any) -> set[int]:
    """Return the ids of the parameters that an optimizer of ours updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _check_gradients_stay(optimizers: Iterable[Any]) -> None:
    """Raise `ConfigError` if one of our optimizers moves gradients out of `.grad` during backward."""
    if not all(optimizer.keeps_grads for optimizer in optimizers):
        # The error names both settings, as either of the two may be the reason.
        CLIPPED_APART.refuse("keep_grads, gradient_memory", "gradients that leave")


def tell_last_pass(optimizer: Any, accelerator: Any) -> None:
    """Have an optimizer of ours ask its accelerator whether a backward pass is the last before a step."""
    state = accelerator.gradient_state  # not the accelerator, which has the optimizer: that would be a cycle
    # `sync_gradients` is true in the last micro-step before a step.
    optimizer.last_micro_step(lambda: bool(state.sync_gradients))


def disable_no_sync(accelerator: Any) -> None:
    """Have `accelerator.no_sync` do nothing: else FSDP2 would keep gradients on the device until the last micro-step.

    FSDP2 then moves them to host memory in each micro-step.
    """
    accelerator.no_sync = lambda model: contextlib.nullcontext()


def figures_to_log(optimizer: Any, model: torch.nn.Module) -> dict[str, float]:
    """Return the figures of the last step to log; also log once if the model is mostly frozen."""
    metrics = optimizer.metrics()
    tell_little(int(metrics["state_bytes"]), model.parameters())
    return {f"offload_{name}": metrics[name] for name in LOGGED}


def save(optimizer: Any, folder: str) -> None:
    """Save to a folder that the framework may delete at any time; return when the checkpoint is committed.

    Usually the state stays where it lies on the paths, and the checkpoint names it. The checkpoint is a copy if
    another kept one would have to be released for it: only the framework knows which ones are still wanted.
    """
    optimizer.save_checkpoint(folder, copy=is_to_copy(optimizer.engine, folder))
    optimizer.wait_checkpoint()


def is_to_copy(engine: Any, folder: str) -> bool:
    """Return whether a save to a folder has to be a copy, as another kept checkpoint would be released for it.

    `engine.checkpoints.kept` are the folders whose state stays on the paths; `engine.config.checkpoints` is how many
    there may be.
    """
    own_names = folder, os.path.realpath(folder)  # an older checkpoint in this folder is replaced anyway
    kept_others = [kept for kept in engine.checkpoints.kept if kept not in own_names]
    must_copy = len(kept_others) >= engine.config.checkpoints
    if must_copy and kept_others:  # without others none is kept at all
        text = "%s gets a copy of the state: checkpoints_kept are kept already: %s"
        _log.info(text, folder, ", ".join(kept_others))
    return bool(must_copy)


def pointer(optimizer: Any, folder: str | None, framework: str) -> dict[str, Any]:
    """Return a pointer to an optimizer's checkpoint: what a framework's own file has in place of the state.

    A torch optimizer that loads the pointer must fail, as it would go on without state. So the pointer has, besides
    the folder's name, parameter groups that pass torch's checks, and as the first `step` the bytes of `WAY_BACK`.
    torch cannot convert these to a number, and its error shows them.

    Without groups torch fails, too, but cannot say why. The pointer has none for our SGD, as torch's has no `step` to
    convert and would go on without momentum; and none for optimizers outside `KINDS`, as `WAY_BACK` is not for them.
    """
    content: dict[str, Any] = {POINTER: folder}
    parameter_count = sum(len(group["params"]) for group in optimizer.param_groups)
    # Without parameters there is none whose `step` could be the text.
    if isinstance(optimizer, offload.SGD) or not isinstance(optimizer, KINDS) or not parameter_count:
        return content
    # torch's state dicts number parameters through all groups.
    text, numbers = WAY_BACK.format(framework).encode(), iter(range(parameter_count))
    groups = [{"params": [next(numbers) for _ in group["params"]], "lr": text} for group in optimizer.param_groups]
    return {**content, "state": {0: {"step": text}}, "param_groups": groups}


def release(engine: Any, folder: str) -> None:
    """Release the state that a deleted checkpoint's folder holds on the paths, if it holds any there.

    A checkpoint that is being mirrored is released later, at a save after its copy is complete.
    """
    with contextlib.suppress(OffloadError):  # a copy, being read, released before, or of a session that ended
        engine.checkpoints.release(folder, after_mirror=True)


class WatchedFolder:
    """Tells whether a checkpoint's folder has been deleted, by anybody: then its state on the paths can be released.

    The folder is kept open, as its name alone does not tell: a folder that was renamed, or moved within its file
    system, is not deleted, and another folder may have its old name. If that one has the same checkpoint (copied
    back, say), the folder counts as not deleted, as a release goes by the name. In doubt it does, too.
    """

    def __init__(self, folder: str) -> None:
        # `_descriptor` is -1 if the folder was gone from the beginning (`_was_gone`), or it or its `COMMIT` cannot be
        # opened. `_commit` is the content of the checkpoint's file `COMMIT`, b"" without one.
        self._folder, self._descriptor, self._was_gone, self._commit = folder, -1, False, b""
        try:
            self._commit = self._read_commit()
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            self._was_gone = True
        except OSError as cause:
            _log.warning("%s cannot be watched, and keeps its room on the paths: %s", folder, cause.strerror)

    @property
    def is_deleted(self) -> bool:
        """Whether the folder has no name any more, and its checkpoint is not in what has its old name now."""
        if self._descriptor < 0:
            return self._was_gone
        try:
            has_no_name = os.fstat(self._descriptor).st_nlink == 0
        except OSError as cause:
            # A stale descriptor: another node has deleted the folder from a network file system, or the server was
            # started anew.
            has_no_name = cause.errno == errno.ESTALE
        # `st_nlink` alone does not decide: some file systems do not count the names of directories.
        return has_no_name and not self.is_there and not self._has_checkpoint()

    def _has_checkpoint(self) -> bool:
        """Return whether the checkpoint is in what has the folder's name now; True if that cannot be read."""
        try:
            # Without a `COMMIT` from the beginning there is nothing by which the checkpoint could be known.
            return bool(self._commit) and self._read_commit() == self._commit
        except OSError:
            return True

    def _read_commit(self) -> bytes:
        """Return the file `COMMIT` in what has the folder's name now: it identifies a checkpoint. b"" if missing."""
        try:
            with open(os.path.join(self._folder, "COMMIT"), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    @property
    def is_there(self) -> bool:
        """Whether the folder, as it was opened, still has the name that it had."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._folder))
        except OSError:
            return False

    def __del__(self) -> None:
        """Close the folder's descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
