"""The process that `offload check-run` starts: it runs a training and records its first steps.

`python -m offload.cli.checked REQUEST`. Methods of the optimizers are replaced in this process, which ends with the
training. A "reference" run uses nothing of the engine but its arithmetic: state is in memory, no step is hidden, and
hooks leave gradients alone. Beside it, torch's own optimizer gets the same gradients, for fp32 copies of the masters,
clipped by torch's norm; it never touches the model.

A step is *hidden* if part of it is done during forward or backward: it goes on after `step` has returned, or its
updates begin before `step` is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import runpy
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offload
from offload.cli.check_run import DRIFT_A_STEP, MADE, MOST_OBJECTS, ON_CPU, SEEN, TENSOR, Request, Seen
from offload.config import OffloadConfig
from offload.errors import OffloadError
from offload.optim import shards
from offload.optim.groups import names
from offload.optim.optimizer import OffloadedOptimizer
from offload.optim.routes import Route
from offload.optim.scaling import CLIP_EPS

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types whose objects contain no others."""
_FOREIGN = ("offload", *sys.stdlib_module_names)
"""Packages in whose objects no tensors of a script are searched for."""
_PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Dicts of a torch module, whose entries are the module's attributes by their names."""


class _Enough(SystemExit):
    """Ends the script when all steps are recorded. As a `SystemExit` it passes the script's `except Exception`."""


class _TorchTwin:
    """Torch's own optimizer beside one of ours, with the same hyperparameters, over fp32 copies of our masters.

    Made before a step of ours, with copies of all state. From then on it takes each step that ours takes.
    """

    def __init__(self, optimizer: Any) -> None:
        bound = optimizer._weights.bound  # parameters that the optimizer updates
        self._names = {p: name for p, name, _ in names(optimizer.param_groups) if p in bound}
        self._masters = {p: optimizer.state_for(p)["master"] for p in self._names}
        self._first_masters = {p: master.clone() for p, master in self._masters.items()}
        # Of the weights after the last step (`compare`), to notice that the script changes one.
        self._versions = {p: shards.version(p) for p in self._names}
        groups = []
        for group in optimizer.param_groups:
            masters = [self._masters[p] for p in group["params"] if p in self._names]
            groups.append({**group, "params": masters})
        self._torch_optimizer = optimizer.torch_class(groups)
        for parameter, entry in optimizer.state.items():
            copied_entry = {name: value.clone() for name, value in entry.items() if name != "master"}
            self._torch_optimizer.state[self._masters[parameter]].update(copied_entry)

    @torch.no_grad()
    def step(self, optimizer: Any, max_norm: float) -> None:
        """Take the step that our optimizer is about to take, with its hyperparameters and its gradients.

        Args:
            optimizer: Ours, with gradients in `.grad`.
            max_norm: Norm that gradients are clipped to, after the loss scale is divided out; inf for no clipping.
        """
        for group, torch_group in zip(optimizer.param_groups, self._torch_optimizer.param_groups, strict=True):
            known = {name: value for name, value in group.items() if name in torch_group and name != "params"}
            torch_group.update(known)
        scale = optimizer._scaling.loss_scale
        for parameter, master in self._masters.items():
            if self._versions[parameter] != shards.version(parameter):
                # The script has changed the weight: our optimizer takes its master from it, and so does this one.
                master.copy_(shards.local(parameter))
            gradient = parameter.grad
            master.grad = None if gradient is None else shards.local(gradient).cpu().float() / scale
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if norm > max_norm:
            for gradient in gradients:
                gradient *= max_norm / (norm + CLIP_EPS)
        self._torch_optimizer.step()

    def compare(self, optimizer: Any, step: int) -> Iterator[tuple[int, str, float, float]]:
        """Yield a row of `Seen.beside` for each parameter, after both optimizers have taken a step.

        Masters may differ by a part of how far this one has moved, for what the state's format rounds, and by some
        roundings of fp32 a step. Weights' versions are noted, so that the next `step` sees a change by the script.
        """
        for parameter, name in self._names.items():
            master = self._masters[parameter]
            moved = float((master - self._first_masters[parameter]).norm())
            room = optimizer.config.format.drift * moved + step * DRIFT_A_STEP * float(master.norm())
            distance = float((optimizer.state_for(parameter)["master"] - master).norm())
            yield step, name, distance, room
            self._versions[parameter] = shards.version(parameter)


class _Watch:
    """Records the steps of all optimizers of this package in this process."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.seen = Seen()
        self._request, self._folder = request, folder
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # steps taken, by optimizer
        self._torch_twins: WeakKeyDictionary[Any, _TorchTwin] = WeakKeyDictionary()
        self._max_norms: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # of the next step, if it is clipped
        self._saved: dict[str, str] = {}  # folders of this run, by the script's names of checkpoints
        self._leaving = WeakSet[Any]()  # optimizers whose gradients would leave a GPU, which a rehearsal leaves out

    def begin(self) -> None:
        """Replace methods of the optimizers, and register hooks before and after each step."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        replacements = {
            "__init__": self._init,
            "save_checkpoint": self._save_checkpoint,
            "load_checkpoint": self._load_checkpoint,
            "checkpoint_folder": self._checkpoint_folder,
        }
        # Methods that do nothing in a run. The script's own checkpoints stay as they are.
        ignored = ["release_checkpoint", "commit_on_sigterm"]
        if self._request.reference:  # no step is hidden, and hooks leave gradients alone
            replacements["clip_grad_norm_"] = self._clip_grad_norm
            ignored += ["overlap_forward", "overlap_backward", "park"]
            for route in Route.__subclasses__():  # the base class does nothing when a gradient arrives
                route._handle_gradient = Route._handle_gradient  # type: ignore[method-assign]
        else:  # with `check`, weights are NaN until they are updated: one that is read too early shows
            replacements["overlap_forward"] = lambda plain, *what, **options: plain(
                *what, **{**options, "check": True}
            )
        for name, replacement in replacements.items():
            self._replace(name, replacement)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):  # both have the function, and scripts use either
            module.clip_grad_norm_ = partial(self._note_clip, module.clip_grad_norm_)  # type: ignore[attr-defined]
        for name in ignored:  # some return a hook's handle, which scripts may call `remove` of
            self._replace(name, lambda _plain, *_arguments, **_options: SimpleNamespace(remove=lambda: None))

    @staticmethod
    def _replace(name: str, replacement: Any) -> None:
        """Replace a method of the optimizers; `replacement` gets the replaced method before its arguments."""
        plain = getattr(OffloadedOptimizer, name)
        setattr(OffloadedOptimizer, name, lambda *arguments, **options: replacement(plain, *arguments, **options))

    def _init(self, plain: Any, optimizer: Any, params: Any, defaults: Any, config: Any, *options: Any) -> None:
        """Replace `OffloadedOptimizer.__init__`: make the optimizer with the config of this run."""
        config = config if self._request.config is None else self._request.config
        config = config if isinstance(config, OffloadConfig) else OffloadConfig.from_dict(config or {})
        plain(optimizer, params, defaults, self._config_for_run(config), *options)
        # `config` says what the settings are: a rehearsal's config for this run keeps gradients in any case.
        if self._request.on_cpu and not config.keep_grads:
            self._leaving.add(optimizer)

    def _note_clip(self, plain: Any, parameters: Any, *arguments: Any, **options: Any) -> Any:
        """Replace torch's `clip_grad_norm_`: note the call if it would find no gradients on a GPU."""
        # A list, as `parameters` may be an iterator, which gives its items to one reader alone.
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        leaving = {id(p) for optimizer in self._leaving for group in optimizer.param_groups for p in group["params"]}
        self.seen.clips_nothing |= any(id(parameter) in leaving for parameter in clipped)
        return plain(clipped, *arguments, **options)

    def _config_for_run(self, config: OffloadConfig) -> OffloadConfig:
        """Return the config to use in place of the script's: in memory, or with folders of this run's own."""
        if self._request.on_cpu:
            config = dataclasses.replace(config, **ON_CPU)
        if self._request.reference:
            return config.in_memory().updated_by_cpu()
        paths = []
        for path in config.path_configs:
            # For a bucket, where no folder has to be made; or for a missing folder, which the optimizer refuses.
            run_path = f"{path.path}/check-run-{uuid.uuid4()}"
            if os.path.isdir(path.path):
                run_path = tempfile.mkdtemp(prefix="check-run-", dir=path.path)
                with (self._folder / MADE).open("a") as made_file:  # so that whoever started this run removes it
                    made_file.write(f"{run_path}\n")
            # Processes take turns on the script's own path, as without this check: None would mean `run_path`.
            paths.append(dataclasses.replace(path, path=run_path, lock_path=path.lock_path or path.path))
        memory = config.host_memory if self._request.host_memory is None else self._request.host_memory
        # Without a mirror: it is the script's, and would get copies of this run's checkpoints.
        return dataclasses.replace(config, paths=paths, host_memory=memory, mirror=None)

    @staticmethod
    def _checkpoint_folder(plain: Any, optimizer: Any, folder: Any) -> Any:
        """Replace `checkpoint_folder`: only make the folder, as the script may write files of its own there."""
        os.makedirs(folder, exist_ok=True)
        return contextlib.nullcontext()

    def _save_checkpoint(self, plain: Any, optimizer: Any, path: Any, **options: Any) -> None:
        """Replace `save_checkpoint`: save to a folder of this run instead, with a copy of all state."""
        folder = self._saved.setdefault(str(path), str(self._folder / f"checkpoint-{len(self._saved)}"))
        plain(optimizer, folder, **{**options, "copy": True})

    def _load_checkpoint(self, plain: Any, optimizer: Any, path: Any, **options: Any) -> Any:
        """Replace `load_checkpoint`: load what this run saved under that name; torch's twin is made anew from it."""
        self._torch_twins.pop(optimizer, None)
        return plain(optimizer, self._saved.get(str(path), path), **options)

    def _clip_grad_norm(self, plain: Any, optimizer: Any, max_norm: float, **options: Any) -> Any:
        """Replace `clip_grad_norm_`: note the norm for torch's twin, too."""
        self._max_norms[optimizer] = float(max_norm)
        return plain(optimizer, max_norm, **options)

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        """Torch's hook before a step: record weights and gradients, and let torch's twin take the step.

        A closure, which computes the gradients, is called here; `step` gets another one that only returns its loss.

        Returns:
            The arguments for `step`; None, which leaves them, for an optimizer that is not ours.

        Raises:
            _Enough: All steps are recorded: the script ends.
        """
        if not isinstance(optimizer, OffloadedOptimizer):
            return None
        step = self._steps.setdefault(optimizer, 0)
        if step >= self._request.steps:  # the script has caught the `_Enough` of `_after_step`, and goes on
            raise _Enough
        # `arguments` begin with the optimizer itself.
        if closure := (arguments[1] if len(arguments) > 1 else options.get("closure")):
            with torch.enable_grad():
                loss = closure()
            arguments, options = (optimizer, lambda: loss), {}
        # Waits for the step before, if it goes on in forward. Reading state would wait for it, too, but would also
        # revoke the updates that backward has made for the coming step: the step would make them anew, and this run
        # would never check them.
        optimizer.finish()
        if step:  # new weights of the step before, which may have gone on until now
            self._record(optimizer, step, "weight")
        self._record(optimizer, step + 1, "gradient")
        if self._request.reference and optimizer.torch_class is not None:
            if optimizer not in self._torch_twins:
                self._torch_twins[optimizer] = _TorchTwin(optimizer)
            self._torch_twins[optimizer].step(optimizer, self._max_norms.pop(optimizer, torch.inf))
        return arguments, options

    def _after_step(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        """Torch's hook after a step: compare with torch's twin; after the last step, record all and end."""
        if not isinstance(optimizer, OffloadedOptimizer):
            return
        step = self._steps[optimizer] = self._steps[optimizer] + 1
        self.seen.steps = max(self.seen.steps, step)
        if optimizer in self._torch_twins:
            self.seen.beside += self._torch_twins[optimizer].compare(optimizer, step)
        if step == self._request.steps:
            for other in [*self._steps]:  # so that the script's own tensors are whole
                other.finish()
            for kind in ("weight", *optimizer.rule.names):
                self._record(optimizer, step, kind)
            if self._request.script is not None:
                self._record_script(self._request.script, step)
            self.seen.metrics = optimizer.metrics()
            raise _Enough

    def close(self) -> None:
        """Close the optimizers, which deletes their stores."""
        for optimizer in [*self._steps]:
            with contextlib.suppress(OffloadError):
                optimizer.close()

    def _record(self, optimizer: Any, step: int, kind: str) -> None:
        """Record the bits of one tensor of every parameter.

        Args:
            step: The step that the tensors are recorded for, from 1.
            kind: "weight", "gradient", or the name of a tensor of state.
        """
        number = [*self._steps].index(optimizer)  # in the order of their first steps
        of_optimizer = f" of optimizer {number + 1}" if number else ""
        for parameter, name, _ in names(optimizer.param_groups):
            if parameter not in optimizer._weights.bound:  # nothing updates it
                continue
            by_kind = {"gradient": parameter.grad, "weight": parameter}
            tensor = by_kind[kind] if kind in by_kind else optimizer.state_for(parameter)[kind]
            if tensor is None:  # it got no gradient in this step
                continue
            about = f"{kind} of {name}{of_optimizer}"
            self.seen.tensors.append((step, about, self._digest(tensor, (step, about))))

    def _record_script(self, script: str, step: int) -> None:
        """Record the bits of the script's own tensors, except weights, which have been recorded."""
        weights = {id(p) for optimizer in self._steps for group in optimizer.param_groups for p in group["params"]}
        own, self.seen.is_whole = script_tensors(script, sys._getframe())
        for name, tensor in own.items():
            if id(tensor) not in weights:
                self.seen.own[name] = self._digest(tensor, (step, name))

    def _digest(self, tensor: torch.Tensor, about: tuple[int, str]) -> str:
        """Return a digest of a tensor's bits; write it to a file if the request asks for `about` (step and name)."""
        if about in self._request.dump:
            file = self._folder / TENSOR.format(self._request.dump.index(about))
            torch.save(shards.local(tensor).detach().cpu().clone(), file)  # with its dtype and shape
        return hashlib.blake2b(shards.content(tensor).numpy().data, digest_size=16).hexdigest()


def script_tensors(script: str, frame: FrameType | None) -> tuple[dict[str, torch.Tensor], bool]:
    """Return a script's tensors, each by the shortest expression that leads to it; and whether these are all.

    A breadth-first search from the globals of the script's modules and the locals of its running functions, over at
    most `MOST_OBJECTS` objects. Modules below the script's folder are its own, too, unless they are installed.

    Args:
        script: The script's file.
        frame: Frame of the function that is running. The search begins with the locals of those functions among it
            and its callers that are the script's. None to begin with globals alone.
    """
    is_own = _is_own_file(script)
    # Dicts are copied (`[*...]`) before they are gone through, here and below: other threads may change them.
    modules = {name: m for name, m in [*sys.modules.items()] if is_own(getattr(m, "__file__", None))}
    # Objects to look into: an expression, the function in which it holds (" in main()", "" for globals), the object.
    waiting: deque[tuple[str, str, Any]] = deque()
    for module_name, module in modules.items():
        prefix = "" if module_name == "__main__" else f"{module_name}."
        waiting.extend((f"{prefix}{name}", "", value) for name, value in [*vars(module).items()])
    while frame is not None:
        # "<module>" is a module's own code, whose locals are its globals.
        if is_own(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            where = f" in {frame.f_code.co_name}()"
            waiting.extend((name, where, value) for name, value in [*frame.f_locals.items()])
        frame = frame.f_back
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # by id; it keeps the objects alive, so that no id is used again
    while waiting and len(seen) < MOST_OBJECTS:
        name, where, value = waiting.popleft()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and not value.is_meta:  # others have no plain memory to compare
                tensors.setdefault(f"{name}{where}", value)
        else:
            waiting.extend((f"{name}{part}", where, child) for part, child in _parts(value, modules))
    return tensors, not waiting


def _is_own_file(script: str) -> Callable[[str | None], bool]:
    """Return a function that says whether a file is the script, or in its folder or below and not installed."""
    path = Path(script).resolve()
    # A Python environment may lie below the script's folder, and so may this package.
    installed = [Path(place) for place in (sys.prefix, sys.base_prefix, Path(offload.__file__).parent)]

    def is_own(file: str | None) -> bool:
        """Return whether a file is the script's; not for None, which modules without a file have."""
        if file is None:
            return False
        module = Path(file).resolve()
        is_installed = "site-packages" in module.parts or any(module.is_relative_to(root) for root in installed)
        return module == path or (module.is_relative_to(path.parent) and not is_installed)

    return is_own


def _parts(value: Any, modules: dict[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object contains, each after the text to append to the object's expression.

    Dicts, lists, tuples and deques contain their items; other objects their attributes; functions also the variables
    of outer functions that they use. Nothing is looked for in functions and classes that are not of `modules` (the
    script's, by name), in modules, in our optimizers, and in objects of classes that `_FOREIGN` packages have.
    """
    if isinstance(value, dict):
        for number, (key, child) in enumerate([*value.items()]):  # torch's optimizers have tensors as keys
            yield f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{number}]", child
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", child) for number, child in enumerate([*value]))
    elif isinstance(value, (FunctionType, type)):
        if value.__module__ in modules:
            yield from ((f".{name}", child) for name, child in [*vars(value).items()])
            with contextlib.suppress(ValueError):  # of a variable that has no value yet
                for name, cell in zip(*_closure(value), strict=True):
                    yield f".{name}", cell.cell_contents
    elif not isinstance(value, (ModuleType, OffloadedOptimizer)) and (
        # This one type of the standard library has attributes that scripts give it.
        isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _FOREIGN
    ):
        for name, child in [*getattr(value, "__dict__", {}).items()]:
            if name in _PARTS_OF_MODULES and isinstance(value, torch.nn.Module):  # its entries are attributes
                yield from ((f".{part}", item) for part, item in [*child.items()])
            else:
                yield f".{name}", child


def _closure(value: FunctionType | type) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and cells of the variables of outer functions that a function uses; none for a class.

    A cell is Python's holder of such a variable: `cell_contents` is the value.
    """
    return (value.__code__.co_freevars, value.__closure__ or ()) if isinstance(value, FunctionType) else ((), ())


def main(file: str) -> None:
    """Run the script or command of a `Request`, and write what was recorded (`Seen`), also if it fails.

    Args:
        file: The request's file; other files of the run are written beside it.
    """
    folder = Path(file).parent
    request = msgspec.msgpack.decode(Path(file).read_bytes(), type=Request)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)  # all seeds, before the script sets its own
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A debugging aid that deterministic algorithms switch on, and which costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    watch = _Watch(request, folder)
    watch.begin()
    sys.argv = [request.script or "offload", *request.arguments]
    try:
        with contextlib.suppress(_Enough):
            if request.script is None:
                from offload.cli import main as command

                sys.exit(command(request.arguments))
            sys.path[0] = str(Path(request.script).resolve().parent)  # as `python SCRIPT` has it
            runpy.run_path(request.script, run_name="__main__")
    finally:
        watch.seen.imports_deepspeed = "deepspeed" in sys.modules
        (folder / SEEN).write_bytes(msgspec.msgpack.encode(watch.seen))
        watch.close()


if __name__ == "__main__":
    main(sys.argv[1])
