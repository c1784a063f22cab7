"""The state of an optimizer: users read it, replace it, and save it to checkpoints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch

from offload import waits
from offload.checkpoint.exchange import SafetensorsSource, import_distributed
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import MODEL_KEY
from offload.checkpoint.reader import Checkpoint, StateSource
from offload.checkpoint.request import SaveRequest
from offload.config import OffloadConfig
from offload.errors import CheckpointError, ConfigError
from offload.layout import bare_names, matching_names
from offload.optim import folders, ranks, shards
from offload.optim.groups import (
    NOT_LOADED,
    Group,
    checked_groups,
    from_json,
    names,
    set_hyperparameters,
    to_json,
    torch_defaults,
)
from offload.optim.holder import EngineHolder
from offload.optim.model import ModelRest, SavedRest, listed
from offload.optim.overlap import OptimizerLock, Overlap
from offload.optim.state import Entry, StateView, is_empty
from offload.optim.weights import AnotherRankFailedError, BoundParameter, Weights
from offload.rules import UpdateRule
from offload.session.engine import Engine

_log = logging.getLogger("offload")


class StatefulOptimizer(torch.optim.Optimizer):
    """An optimizer whose state an engine keeps. Gradients and steps are `OffloadedOptimizer`'s."""

    rule: UpdateRule
    """The state of each parameter, and how a step changes it."""

    kind: str
    """The optimizer's name in checkpoints."""

    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = None
    """Torch's own optimizer of the same rule, if it has one."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], holder: EngineHolder) -> None:
        self._lock = OptimizerLock(self)
        self._holder = holder
        self._weights = Weights(holder)
        self._overlap = Overlap(holder, self._weights)
        self._made_by = ranks.world()  # to notice later that there are other ranks than now
        self._state = self._view_of_state()
        self.defaults = defaults  # checked before anything is asked of parameters, as torch does
        self.rule.check(defaults)
        self._check_group(defaults)
        super().__init__(params, defaults)

    @property
    def engine(self) -> Engine:
        """The engine under this optimizer."""
        return self._holder.engine

    def _open(self, config: OffloadConfig) -> None:
        """Open the engine; see `OptimizerParts`."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Wait until the last step is over; see `OptimizerParts`."""
        self._overlap.finish()

    # The rule

    def _check_group(self, group: Group) -> None:
        """Refuse hyperparameters that cannot be used."""
        self._check_values(self.rule, self.rule.values(group))

    def _check_values(self, rule: UpdateRule, values: Any) -> None:
        """Refuse hyperparameters that a rule, or the format that its state is stored in, cannot use."""
        # For its checks alone: `row` raises `ConfigError` for such values. The scalars that it returns are not used.
        self._holder.config.state_of(rule).row(step=1, values=values, grad_scale=1.0)

    def _check_saved_group(self, group: Group) -> None:
        """Refuse a group of a state dict that is of another rule, or cannot be used."""
        self._check_group(group)

    def _add_new_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters of groups, frozen or not, to the engine, without those that it has already."""
        raise NotImplementedError

    def _view_of_state(self) -> StateView:
        """Return the view that users get as `state`; called once, by the constructor."""
        return StateView(self._holder, self._weights, self.rule, self._lock, self)

    _ignored: ClassVar[tuple[str, ...]] = NOT_LOADED
    """Entries of groups that are neither saved nor loaded."""

    def _start_values_of(self, group: Group) -> Mapping[str, float]:
        """Return the values that a group's state starts from, by name of the state tensor; nothing if all are 0.

        Adagrad, whose sums may start from another value than 0, overrides this.
        """
        return {}

    def _start_values(self) -> dict[torch.Tensor, Mapping[str, float]]:
        """Return the values that state starts from, for parameters where they are not 0; see `OptimizerParts`."""
        pairs = ((self._start_values_of(group), group["params"]) for group in self.param_groups)
        return {parameter: values for values, params in pairs if any(values.values()) for parameter in params}

    # State

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[torch.Tensor, dict[str, torch.Tensor]]:
        """State of all parameters that have been updated, in the form of torch's optimizers; read at each access.

        Reading gives copies. An assignment (`state[p] = ...`, `state[p]["exp_avg"] = ...`) is written to where the
        state lives. `state = {}`, `state.clear()`, `state[p] = {}` and `del state[p]` are `reset_state`. After a
        change of a copy in place (`state[p]["exp_avg"].zero_()`) the next step, save, or access to the state raises
        `ConfigError`; writes that torch's version counter does not see (through `.data` or numpy) are not noticed.
        `state_for` and `state_dict` return copies that are the caller's. Keys that are no tensors are kept as they
        are, and are part of state dicts, not of checkpoints.
        """
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if value is self._state:  # as of a wrapper that reads `state` and assigns it again
            return
        # Another optimizer's view, or anything but an empty mapping.
        if isinstance(value, StateView) or value or not isinstance(value, Mapping):
            raise ConfigError("state", type(value).__name__, "use load_state_dict to replace state")
        self._state.clear()  # as an empty mapping was assigned

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state and all hyperparameters in torch's own layout, all state in fp32.

        16-bit weights have a `master` beside the moments; an fp32 weight is its own. Where a 16-bit weight was
        written to, and is not what its master rounds to, it is shown as the master. A copy of more than 64 MiB lies
        in a file without a name, on a path or in the directory for temporary files (`TMPDIR`), and takes no memory of
        the process's own.

        Raises:
            InfeasiblePlanError: Neither a disk nor memory has room for the copy; nothing was allocated.
            TierError: A disk has failed.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._lock:
            defaults = torch_defaults(self.torch_class)  # so that torch's own optimizer can load the dict
            numbers: dict[torch.Tensor, int] = {}
            for number, (parameter, _, _) in enumerate(names(self.param_groups)):
                numbers.setdefault(parameter, number)  # a parameter in two groups has its first number in both
            saved_groups = []
            for group in self.param_groups:
                hyperparameters = {name: value for name, value in group.items() if name != "params"}
                group_numbers = [numbers[parameter] for parameter in group["params"]]
                saved_groups.append({**defaults, **hyperparameters, "params": group_numbers})
            saved_parameters = self._state.in_state_dict()
            entries = zip(saved_parameters, self._state.read(saved_parameters), strict=True)
            state: dict[Any, Any] = dict(self._state.others)
            state.update((numbers[parameter], entry) for parameter, entry in entries)
            state_dict = {"state": state, "param_groups": saved_groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replacement = post_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        return state_dict

    def state_for(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's `master` and moments as new fp32 CPU tensors, wherever they live; see `state_dict`.

        Raises:
            ConfigError: If the parameter has no state here.
        """
        (entry,) = self._state.read([self._weights.of(parameter).parameter], own_masters=True)
        return self._state.shown(entry)

    def reset_state(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Forget moments and step counts, as if the parameters had never been updated; weights stay.

        Training goes on as with a new optimizer, bit for bit, with one difference: masters of 16-bit weights stay,
        too, which are more exact than the weights that a new optimizer would take them from. So `state_dict` still
        has these parameters, with zeros and a step count of 0.

        Args:
            parameters: Which ones; None for all.

        Raises:
            ConfigError: A parameter has no state here; nothing has changed then.
        """
        self._state.reset(parameters)

    def refresh_masters(self) -> None:
        """Set all masters from the weights with the next step.

        For writes to 16-bit weights that torch's version counter does not see; or to drop the bits that masters have
        beyond the weights that they round to.
        """
        self._weights.reload_masters()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of this class or of torch's own optimizer with the same rule.

        State is never cast down, and copied piece by piece to where it lives. A weight is set to its master, rounded,
        as in `load_checkpoint`; a missing master is taken from the weight. Load the model's weights, too, before or
        after: fp32 weights are not changed, unless there is a master for them.

        Raises:
            ConfigError: Groups, parameters or shapes do not match, or it is another rank's; nothing has changed then.
            CheckpointError: With `shard=True`: another rank could not load its own; nothing has changed then.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        # Where ranks exchange weights, `replace_all` below is a collective: either all ranks come to it, or none.
        with self._failing_on_all_ranks() if self._weights.are_exchanged else contextlib.nullcontext():
            saved_groups = checked_groups(state_dict, self.param_groups, self._check_saved_group)
            saved_keys = chain.from_iterable(group["params"] for group in saved_groups)
            own_parameters = chain.from_iterable(group["params"] for group in self.param_groups)
            parameters: dict[Any, torch.Tensor] = dict(zip(saved_keys, own_parameters, strict=True))
            entries, others = self._checked_entries(state_dict["state"], parameters)
        self._warn_of_left_out(parameters, state_dict["state"])
        with self._lock:
            if self._holder.engine_if_open is not None:  # else there is no state, neither here nor in the dict
                self._state.replace_all(entries)
            self._state.others = others
            for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
                self._set_group(group, saved_group)
            # After `_set_group`, as hyperparameters say what state starts from.
            self._state.write_start_values(bound for bound in self._weights.bound.values() if bound not in entries)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _checked_entries(
        self, state: Mapping[Any, Any], parameters: Mapping[Any, torch.Tensor]
    ) -> tuple[dict[BoundParameter, Entry], dict[Any, Any]]:
        """Check the state in a state dict, before anything is loaded.

        Opens the engine if there is any state, and adds the parameters that have some. Without state, opening stays
        deferred until backward has shown how much of the GPU is free.

        Args:
            state: The dict's "state".
            parameters: The parameter that each key of `state` stands for.

        Returns:
            The parameters' entries, ready to be written; and the entries under keys that stand for no parameter.

        Raises:
            ConfigError: An entry cannot be used.
        """
        if state:
            self._holder.open()
            full_keys = (key for key, entry in state.items() if key in parameters and not is_empty(entry))
            self._add_new_parameters(parameters[key] for key in full_keys)
        entries: dict[BoundParameter, Entry] = {}
        others: dict[Any, Any] = {}
        for key, entry in state.items():
            if key in parameters:
                if not is_empty(entry):
                    bound = self._weights.bound[parameters[key]]
                    entries[bound] = self._state.checked_entry(f"state_dict {key}", entry, bound)
            elif self._state.is_of_parameter(entry):
                advice = "it has state for a parameter that this optimizer does not update"
                raise ConfigError("state_dict", key, advice)
            else:
                others[key] = entry
        return entries, others

    def _set_group(self, group: dict[str, Any], saved_group: Group) -> None:
        """Set a group's hyperparameters to those of a state dict, and its parameters' names if it has none."""
        if saved_group.get("param_names") is not None:
            group.setdefault("param_names", [*saved_group["param_names"]])
        hyperparameters = {name: deepcopy(value) for name, value in saved_group.items() if name not in self._ignored}
        for name, value in hyperparameters.items():
            # torch.distributed.checkpoint saves tuples, such as Adam's betas, as lists.
            was_tuple = isinstance(value, list) and isinstance(group.get(name), tuple)
            group[name] = tuple(value) if was_tuple else value

    def _warn_of_left_out(self, parameters: Mapping[Any, torch.Tensor], state: Mapping[Any, Any]) -> None:
        """Warn of frozen parameters whose state functions of `torch.distributed.checkpoint` may have left out.

        A state dict that these functions load is known by its keys: names of parameters, where others have numbers.

        Args:
            parameters: The parameter that each key stands for.
            state: The dict's "state".
        """
        if not any(isinstance(key, str) and key in parameters for key in state):
            return
        # The log names a parameter as this optimizer's groups do: by the user's name, or its place in `param_groups`.
        # Its key is what the dict calls it, which need not say which parameter of this optimizer it is.
        own_names = {parameter: name for parameter, name, _ in names(self.param_groups)}
        left_out = [own_names[p] for key, p in parameters.items() if not p.requires_grad and key not in state]
        if left_out:
            _log.warning(
                "%d frozen parameters (%s, ...) have no state in what is loaded, where others have: functions of "
                "torch.distributed.checkpoint leave out what is frozen. Where these have been trained, freeze them "
                "after the load; load_checkpoint and import_state keep state of frozen ones",
                len(left_out),
                left_out[0],
            )

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        model: torch.nn.Module | None = None,
        extra: Any = None,
        copy: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Start a checkpoint of the state as it is now; it is written while training goes on.

        State that lies on a path stays there: its place is reserved for the checkpoint. State in memory is written
        during the next forward and backward, and before its next update at the latest. With `copy`, or without
        paths, everything is copied into the folder, which then needs nothing else. Masters that are (fp32) weights
        are written before this returns.

        The last `OffloadConfig.checkpoints_kept` checkpoints without `copy` are kept; an older one stops being one
        when a newer has been committed. With `torch.distributed`, all ranks call this together.

        Args:
            path: Folder, or "s3://bucket/prefix"; made if it is not there. A checkpoint that is already there
                stays valid until the new one is committed.
            model: Also save all of it that the state does not give: buffers, frozen weights, weights of other
                optimizers. Frozen weights are written in the background, and must not change before
                `wait_checkpoint`; all else is copied now.
            extra: Anything else that the training loop needs to go on: random states, position in the data, a
                gradient scaler's `state_dict()`. `torch.save` has to take it; saved as it is now.
            copy: Make the checkpoint self-contained.
            on_done: Called from a thread of its own when the save has ended, with the error or None.

        Raises:
            CheckpointError: The folder cannot be used, there is no room for a checkpoint, some ranks have left
                (`destroy_process_group`), or a tier has failed, whose `TierError` is the `__cause__`; training may go
                on. Later errors are logged, and raised by `wait_checkpoint`.
            SessionBrokenError: The session cannot be used, or broke while state was made ready to be saved.
        """
        ranks.check_all_there(self._made_by, self._has_part_of_state(), "save a checkpoint")
        extra_bytes = None if extra is None else _extra_to_bytes(extra)
        with self._lock:
            self._state.check()
            self._holder.open()
            self._weights.refresh(gradients=False)
            bounds = self._weights.bound.values()
            request = ranks.agree_on_save(SaveRequest(path, copy=copy, on_done=on_done), bounds, self.engine)
            positions = {bound.parameter: bound.position for bound in bounds}
            # What this rank saves beside the state: bytes, or a function that returns them. The function is called in
            # the background, and first writes the model's frozen weights.
            content: bytes | Callable[[], bytes] | None = extra_bytes
            rest = None if model is None else ModelRest.of(model, [*positions])
            # With `DTensor`s each rank saves its own elements of the rest of the model. Without, each rank has all of
            # it: a replica leaves it to the rank that it is a replica of, and with `shard` rank 0 saves it for all.
            is_first = not request.replica and (request.rank == 0 or self._weights.rows_over is None)
            saves_model = rest is not None and (rest.has_dtensors or is_first)
            if rest is not None and saves_model:
                content = partial(rest.snapshot().write, open_folder(path), request.id, request.rank, extra_bytes)
            metadata = {
                **({MODEL_KEY: True} if saves_model else {}),
                "optimizer": self.kind,
                "groups": to_json(self.param_groups, self._ignored),
                # The parameters of each group, by their positions in the engine; None for those without state.
                "members": [[positions.get(p) for p in group["params"]] for group in self.param_groups],
                **request.metadata,
            }
            self.engine.checkpoints.save(replace(request, metadata=metadata, extra=content))

    def wait_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed.

        Args:
            timeout_s: Most seconds to wait; None for no limit.

        Raises:
            CheckpointError: It failed; if a tier has failed, its `TierError` is the `__cause__`. Training may go on.
            TimeoutError: It has not been committed by then.
        """
        self.engine.checkpoints.wait(timeout_s)

    def checkpoint_folder(self, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a folder is written that is one checkpoint of model, optimizer and anything else.

            with optimizer.checkpoint_folder("run/step-100"):
                torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id="run/step-100")
                optimizer.save_checkpoint("run/step-100/optimizer")

        When the context ends, this optimizer's checkpoint in the folder, if there is one, has been committed, all
        files are durable, and a marker says that the folder is whole. Then `OffloadConfig.mirror` copies the folder
        in the background, with all that is in it; see `wait_mirror`. If an exception or a kill ends the context, the
        folder stays marked as not whole, as `offload verify` says. All ranks enter and leave the context together.
        Save another optimizer elsewhere: its checkpoint would not be awaited here, and no mirror has folders of two.

        Args:
            folder: A directory, made if it is not there. Its name is that of its copy in the mirror.

        Raises:
            ConfigError: The folder is in a bucket, or has no possible name.
            CheckpointError: The folder cannot be written, or, when the context ends: a file cannot be made durable,
                or see `wait_checkpoint`; or another rank has left the context by an error.
        """
        return folders.checkpoint_folder(self, os.fspath(folder))

    def wait_mirror(self, timeout_s: float | None = None) -> None:
        """Wait until `OffloadConfig.mirror` has the newest checkpoint that has been committed.

        Args:
            timeout_s: Most seconds to wait; None for no limit.

        Raises:
            CheckpointError: It could not be mirrored. The checkpoint itself is whole, and training may go on.
            TimeoutError: It has not been by then.
        """
        self.engine.checkpoints.wait_mirror(timeout_s)

    def release_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Release a checkpoint that is kept: it can no longer be loaded, and its store slots are free.

        Checkpoints older than the newest `OffloadConfig.checkpoints_kept` are released by themselves. One whose
        folder is missing is not, as it may have been moved or deleted: call this before or after deleting the folder
        of a checkpoint that is still kept. With `torch.distributed`, all ranks call it together.

        Args:
            path: The folder that it was saved to.

        Raises:
            CheckpointError: This optimizer keeps no checkpoint in that folder, or somebody is reading it.
        """
        self.engine.checkpoints.release(path)

    @torch.no_grad()
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        model: torch.nn.Module | None = None,
        hyperparameters: bool = True,
        weights_only: bool = True,
    ) -> Any:
        """Go on from a checkpoint: state, step counts, hyperparameters, and the weights, derived from their masters.

        Tiers, budgets, subgroups, paths and ranks may differ from when it was written. If subgroups, tiles and ranks
        are the same, nothing is copied: state that is not at home in memory stays in its store slots. Parameters are
        matched by their names, so either give names (`model.named_parameters()`) or the same parameters in the same
        order. Frozen parameters of the groups get their state, too; parameters that the checkpoint has no state of
        begin with new state. With `torch.distributed`, all ranks call this together: if one cannot load, all raise.

        Args:
            path: The checkpoint's folder.
            model: Restore what was saved of the model, too.
            hyperparameters: Take the groups' hyperparameters from it, too.
            weights_only: See `torch.load`; False for an `extra` of arbitrary objects, which may run code.

        Returns:
            The `extra` of the rank of this number, or of rank 0 if there was none; None if no `extra` was given.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged, or of another model, as when it has state of a
                parameter that no group has. Nothing has changed then, unless damage was found while the state was
                read, which breaks the session; or another rank could not load what this one has loaded. State that
                stays in its store slots is read, and verified, when it is next used.
        """
        with self._loading_on_all_ranks(), self.engine.checkpoints.open(path) as checkpoint:
            world_size, rank = ranks.world()
            saved_ranks = len(checkpoint.manifests)
            rank = rank if rank < saved_ranks else 0  # a rank beyond those that saved takes the first one's
            # What saved names begin with, if ranks have saved weights of their own (see `ranks.agree_on_save`).
            prefix = str(checkpoint.manifests[rank].metadata.get("prefix") or "")
            if prefix and saved_ranks != world_size:
                raise CheckpointError(
                    f"{checkpoint.path} was saved by {saved_ranks} ranks with weights of their own, as "
                    f"of FSDP1 or ZeroRedundancyOptimizer: load it with as many, not {world_size}"
                )
            saved_names_here = _names_in_checkpoint(self._own_names().values(), checkpoint, prefix).values()
            # The peer, the rank that has saved most of this one's parameters, gives hyperparameters and the model.
            peer = checkpoint.rank_with(saved_names_here, rank)
            metadata = self._metadata_of_groups(checkpoint, peer, saved_names_here, warns=hyperparameters)
            groups = self._groups_of_checkpoint(metadata, checkpoint.path)  # also checks that it is of this optimizer
            # A replica has saved no parameters, but may have saved its own part of a model of `DTensor`s.
            is_replica = not checkpoint.manifests[rank].layout.parameters
            if is_replica and saved_ranks == world_size and _has_model(checkpoint, rank):
                peer = rank
            saved_rest, extra_bytes = _model_rest_and_extra(checkpoint, rank, peer, wants_model=model is not None)
            if model is not None and saved_rest is None:
                raise CheckpointError(f"{checkpoint.path} was saved without model=, so it has nothing of the model")
            extra = None if extra_bytes is None else _read_extra(extra_bytes, checkpoint.path, weights_only)
            saved_names, without_saved_state = self._bind_saved(checkpoint, prefix)
            restore_model: Callable[[], None] | None = None
            if model is not None and saved_rest is not None:
                bounds = self._weights.bound.values()
                # Weights that the checkpoint's state gives; it has saved all others with the model.
                own = [each.parameter for each in bounds if each.name not in without_saved_state]
                rest = ModelRest.of(model, own)
                if rest.has_dtensors and (saved_ranks != world_size or not _has_model(checkpoint, peer)):
                    raise CheckpointError(
                        f"{checkpoint.path} was saved by {saved_ranks} ranks, each with its part of "
                        f"the model: load it with as many, not {world_size}"
                    )
                # The model is checked before anything is loaded, and restored after all has been.
                checked = saved_rest.check(rest, weights_only=weights_only)
                restore_model = partial(saved_rest.restore, model, rest, checked)
            self._load(checkpoint, groups if hyperparameters else None, saved_names, without_saved_state)
            if restore_model is not None:
                restore_model()
        return extra

    @torch.no_grad()
    def import_state(self, path: str | os.PathLike[str], *, hyperparameters: bool = True) -> None:
        """Go on from optimizer state of another format, streamed: safetensors, or `torch.distributed.checkpoint`.

        Parameters are matched by their names. A missing master is taken from the weight, so load the model's weights
        first; where there is a master, the weight is derived from it. With `torch.distributed`, all ranks call this
        together: if one cannot load, all raise.

        Args:
            path: A file, as `offload.checkpoint.exchange.export_safetensors` writes them, or the folder of a
                distributed checkpoint, for which a file as large as the state is made meanwhile in the directory for
                temporary files (`TMPDIR`).
            hyperparameters: Take the groups' hyperparameters from it, too, where it has them.

        Raises:
            CheckpointError: It cannot be read, or is of another model.
        """
        with self._loading_on_all_ranks(), contextlib.ExitStack() as stack:
            if os.path.isdir(path):
                scratch = stack.enter_context(tempfile.TemporaryDirectory())
                source = import_distributed(path, os.path.join(scratch, "state"))
            else:
                source = SafetensorsSource(path)
            # Other programs' files have no hyperparameters.
            groups = self._groups_of_checkpoint(source.metadata, source.path) if source.metadata else None
            saved_names, without_saved_state = self._bind_saved(source)
            bounds = self._weights.bound.values()
            # Files are row-major; state lies in the order of its weight's memory.
            source.use_strides({saved_names[bound.name]: bound.form.strides for bound in bounds})
            self._load(source, groups if hyperparameters else None, saved_names, without_saved_state)

    def _groups_of_checkpoint(self, metadata: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
        """Return the groups' hyperparameters from a checkpoint's metadata, checked."""
        return from_json(metadata, path, self.kind, self.param_groups, self._check_group, self._ignored)

    def _own_names(self) -> dict[torch.Tensor, str]:
        """Return the names of groups' parameters, frozen or not.

        A bound parameter keeps the name that it was bound by: `load_state_dict` may have given its group other names.
        """
        bound = self._weights.bound
        return {p: bound[p].name if p in bound else name for p, name, _ in names(self.param_groups)}

    def _metadata_of_groups(
        self, checkpoint: Checkpoint, like: int, saved_names: Collection[str], *, warns: bool
    ) -> Mapping[str, Any]:
        """Return the checkpoint's metadata for this rank: that of the rank `like`, groups included.

        If several ranks have saved this rank's parameters, and their groups had unlike hyperparameters, no saved
        groups fit: then the metadata has this rank's own groups.

        Args:
            checkpoint: The checkpoint.
            like: The rank that has saved most of this rank's parameters.
            saved_names: The names of this rank's parameters in the checkpoint.
            warns: Whether to log a warning if the metadata has this rank's own groups.
        """
        metadata = checkpoint.manifests[like].metadata
        # Parameters of this rank that `like` has not saved, the manifests of ranks that have saved some of these, and
        # which of these ranks had other groups than `like`.
        missing = set(saved_names).difference(checkpoint.manifests[like].layout.index_by_name)
        manifests = [each for each in checkpoint.manifests if not missing.isdisjoint(each.layout.index_by_name)]
        unlike_ranks = [each.rank for each in manifests if each.metadata.get("groups") != metadata.get("groups")]
        if not unlike_ranks:
            return metadata
        if warns:
            _log.warning(
                "%s has parameters of this rank from ranks %d and %d, whose groups had unlike hyperparameters: "
                "this rank's groups keep their own; set them if they were changed in training",
                *(checkpoint.path, like, unlike_ranks[0]),
            )
        return {**metadata, "groups": to_json(self.param_groups, self._ignored)}

    @contextlib.contextmanager
    def _loading_on_all_ranks(self) -> Iterator[None]:
        """Hold the lock for a block that loads; raise on all ranks if it fails on one.

        If weights are dealt, users' changes of them are sent to their owner ranks before the block. If ranks exchange
        updated weights, they exchange those that were loaded after it.
        """
        if self._has_part_of_state():
            ranks.check_all_there(self._made_by, True, "load")
        with self._failing_on_all_ranks(), self._lock:
            self._weights.refresh(gradients=False)  # sends users' changes of weights that are not loaded
            yield
        # A collective, so only now that the block has ended well on all ranks.
        with self._lock:
            self._weights.gather()

    def _has_part_of_state(self) -> bool:
        """Return whether this rank has only a part of the state, and other ranks the rest of it.

        It is so if weights are cut by rows or dealt, are `DTensor`s, or are sharded by FSDP1.
        """
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        return self._weights.are_exchanged or any(
            shards.is_dtensor(parameter) or ranks.is_flattened(parameter) for parameter in parameters
        )

    @contextlib.contextmanager
    def _failing_on_all_ranks(self) -> Iterator[None]:
        """After a block, raise on all ranks if it has failed on one: else ranks would go on with different state.

        That takes a collective. None follows an `AnotherRankFailedError`, which the block has raised on all ranks. If
        the collective takes long, a timer logs what it waits for.
        """
        error: Exception | None = None
        try:
            yield
        except AnotherRankFailedError:
            raise
        except Exception as caught:
            error = caught
        if ranks.world()[0] > 1:
            text = "waiting for all ranks to load: that is a call of every rank"
            timer = threading.Timer(waits.QUIET_S, _log.warning, [text])
            timer.daemon = True
            timer.start()
            try:
                self._weights.agree_on_load(error)
            finally:
                timer.cancel()
        elif error is not None:
            raise error

    def _bind_saved(self, source: StateSource, prefix: str = "") -> tuple[dict[str, str], set[str]]:
        """Open the engine, and add the parameters of groups, frozen or not, that a checkpoint has state of.

        Args:
            source: The checkpoint.
            prefix: What this rank's names in the checkpoint begin with.

        Returns:
            The name in the checkpoint of each parameter of the groups, by its name here; and the names here of bound
            parameters that the checkpoint has no state of.

        Raises:
            CheckpointError: It has state of a parameter that no group has, which would be dropped.
        """
        self._holder.open()
        bound = self._weights.bound
        own_names = self._own_names()
        saved_names = _names_in_checkpoint(own_names.values(), source, prefix)
        source_names = set(source.names)
        saved = [parameter for parameter, name in own_names.items() if saved_names[name] in source_names]
        without_saved_state = {own_names[p] for p in bound}.difference(own_names[p] for p in saved)
        world_size, rank = ranks.world()
        # The names that this rank should load; None if another number of ranks has saved, as nobody knows them then.
        rank_names = source.names_of(rank, world_size) if isinstance(source, Checkpoint) else source.names
        used_names = set(saved_names.values())
        # Saved parameters that no group has. One without updates does not count, as its state is no loss.
        unused = [name for name in rank_names or source.names if name not in used_names and source.step_of(name)]
        if unused and without_saved_state:
            # It is of another model. With an empty set no parameter may begin anew, so loading it raises, and names
            # what it lacks.
            return saved_names, set()
        # The unused state may be another rank's, if this rank has none of the parameters that the rank of its number
        # has saved, or if it is not known which these are.
        may_be_of_another_rank = world_size > 1 and used_names.isdisjoint(rank_names or ())
        if unused and not may_be_of_another_rank:
            raise CheckpointError(
                f"{source.path} has state of {listed(unused)}, which no parameter group has: give the optimizer all "
                "that was trained, frozen or not"
            )
        if unused:
            _log.warning("%s has state of %s, which no group of this rank has", source.path, listed(unused))
        if any(parameter not in bound for parameter in saved):
            # If matrices are dealt, an addition is a collective, so none begins it if another rank has failed before.
            if self._weights.are_exchanged:
                self._weights.agree_on_load()
            self._add_new_parameters(saved)
        if without_saved_state:
            which = "it begins" if len(without_saved_state) == 1 else "they begin"
            _log.warning("%s has no state of %s: %s anew", source.path, listed(sorted(without_saved_state)), which)
        return saved_names, without_saved_state

    def _load(
        self,
        source: StateSource,
        groups: list[dict[str, Any]] | None,
        saved_names: Mapping[str, str],
        without_saved_state: Collection[str],
    ) -> None:
        """Load state, and then hyperparameters.

        Args:
            source: The checkpoint.
            groups: Hyperparameters of the groups; None: they keep their own.
            saved_names, without_saved_state: What `_bind_saved` has returned.
        """
        bounds = self._weights.bound.values()
        _check_forms(source, bounds, saved_names)
        self._weights.rebind_changed()  # as loading writes weights where they lie now
        world_size, rank = ranks.world()
        # Before the load, which may fail when it has replaced some of the state.
        self._state.copies.unwatch_all()
        self._state.note_change()
        self.engine.checkpoints.load(source, names=saved_names, rank=rank, ranks=world_size, anew=without_saved_state)
        self._weights.note_written(bounds)
        self._state.note_loaded(bound for bound in bounds if bound.name in without_saved_state)
        if groups is not None:
            set_hyperparameters(self.param_groups, groups)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the engine's memory and files are this process's."""
        raise ConfigError("optimizer", type(self).__name__, "copy or save optimizer.state_dict() instead")


def _names_in_checkpoint(own_names: Iterable[str], source: StateSource, prefix: str) -> dict[str, str]:
    """Return the name in a checkpoint of each parameter, by its name here.

    It is `prefix` and the name in the bare model; or, if the checkpoint has no such name, one that differs only by
    what wrappers add. A parameter that the checkpoint does not have gets the name that it would have there.
    """
    expected = {name: prefix + bare for name, bare in bare_names(own_names).items()}
    alike = matching_names(expected.values(), source.names)
    return {name: alike.get(saved_name, saved_name) for name, saved_name in expected.items()}


def _check_forms(source: StateSource, bounds: Iterable[BoundParameter], saved_names: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose parameters had other shapes or strides than those here.

    Elements of state are saved in the order of their weight's memory, which strides decide.
    """
    for bound in bounds:
        saved_name = saved_names[bound.name]
        saved_form = source.shape_of(saved_name) if saved_name in source.names else None
        form = tuple(bound.form.shape), tuple(bound.form.strides)
        if saved_form is not None and saved_form != form:
            saved_shape, saved_strides = saved_form
            raise CheckpointError(
                f"{source.path} is of another model: {bound.name} has shape {saved_shape} and strides "
                f"{saved_strides} there and {form[0]} and {form[1]} here"
            )


def _extra_to_bytes(extra: Any) -> bytes:
    """Return a checkpoint's `extra` as `torch.save` writes it; warn if reading it can run code."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    extra_bytes = buffer.getvalue()
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        _log.warning("extra holds %s: load_checkpoint will need weights_only=False", ", ".join(unsafe))
    return extra_bytes


def _has_model(checkpoint: Checkpoint, rank: int) -> bool:
    """Return whether a rank has saved the rest of its model, beside the state."""
    return bool(checkpoint.manifests[rank].metadata.get(MODEL_KEY))


def _model_rest_and_extra(
    checkpoint: Checkpoint, rank: int, like: int, *, wants_model: bool
) -> tuple[SavedRest | None, bytes | None]:
    """Return the rest of the model, and a rank's `extra`, as a checkpoint has them; None for what it has not.

    Args:
        checkpoint: The checkpoint.
        rank: Whose `extra` it is.
        like: The rank whose model it is; if that rank has saved none, rank 0 has saved it for all.
        wants_model: Whether to read the model; else None is returned for it.
    """

    def read(number: int) -> SavedRest:
        """Return what a rank has saved of the model; its bytes hold the `extra`, too."""
        return SavedRest.read(checkpoint.path, checkpoint.id, number, checkpoint.extra(number) or b"")

    extra = read(rank).extra if _has_model(checkpoint, rank) else checkpoint.extra(rank)
    source = next((number for number in (like, 0) if _has_model(checkpoint, number)), None)
    return read(source) if wants_model and source is not None else None, extra


def _read_extra(extra_bytes: bytes, path: str, weights_only: bool) -> Any:
    """Return the `extra` that was given to a checkpoint."""
    try:
        return torch.load(io.BytesIO(extra_bytes), weights_only=weights_only)
    except Exception as cause:
        why = _why_unread(extra_bytes, cause)
        raise CheckpointError(f"what was given as extra to {path} cannot be read: {why}") from cause


def _why_unread(extra: bytes, cause: Exception) -> str:
    """Return, in one line, why `torch.load` does not read a checkpoint's `extra`."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(extra))
    except Exception:  # `extra` is damaged, or of another version
        unsafe = []
    if not unsafe:
        return str(cause).partition("\n")[0]
    return (
        f"it holds {', '.join(unsafe)}, and only tensors, numbers, text and containers are read without running code;"
        " save arrays as torch.from_numpy(array), or, if you trust the file, pass weights_only=False"
    )
