"""What the optimizers of all ZeRO stages share: the update, norms, checkpoints through memory, refusals."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shlex
import socket
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from offload import CheckpointError, Engine, OffloadConfig
from offload.checkpoint.torch_files import fill, start_of
from offload.combinations import DEEPSPEED_FORWARD, NONE_KEPT, SAVED_APART
from offload.integrations.deepspeed import in_place, stream
from offload.integrations.deepspeed.behind import PendingTag, SavesBehind, discard, partial_of, set_aside
from offload.integrations.deepspeed.in_place import Frame, InPlace
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.ranks import greatest, on_all_ranks, told_on
from offload.integrations.deepspeed.settings import Saving, naming_the_object
from offload.integrations.deepspeed.shard import FlatState, Shard, group_values
from offload.integrations.deepspeed.stream import SharedModel
from offload.optim.hiding import Announcer, AutoOverlap
from offload.optim.preemption import SigtermHandler
from offload.rules import UpdateRule

log = logging.getLogger("offload")

STEPS = "offload_steps"
"""Our entry in DeepSpeed's optimizer checkpoints: updates of each parameter by name (DeepSpeed has one count)."""


_T = TypeVar("_T")


def say_what_waits(engine: Any, config: OffloadConfig) -> None:
    """Warn of bucket sizes so large that DeepSpeed reduces all gradients, or gathers all weights, at once."""
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    gathers, stage = config.overlaps_forward, engine.zero_optimization_stage()
    checks = [
        (config.overlaps_backward, "reduce_bucket_size", engine.zero_reduce_bucket_size(), "during backward"),
        (gathers and stage == 3, "stage3_prefetch_bucket_size", engine.zero_prefetch_bucket_size(), "in forward"),
    ]
    for overlaps, name, size, where in checks:
        if overlaps and size >= numel:
            log.warning("%s %d holds all %d parameters: little is hidden %s; give less", name, size, numel, where)


def find_device(weights: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the accelerator that a rank's weights are on; None for the CPU."""
    device = next((weight.device for weight in weights), torch.device("cpu"))
    return None if device.type == "cpu" else device


def make_shard(
    pieces: Sequence[Piece],
    weights: Sequence[torch.Tensor],
    config: OffloadConfig,
    group: Any,
    gradient_dtype: torch.dtype,
    rule: UpdateRule,
) -> Shard:
    """Make one rank's shard, with directories of its own and its part of the cores and NUMA nodes that ranks share.

    Collective over `group`.
    """
    device = find_device(weights)
    from_far = import_module("deepspeed.accelerator").get_accelerator().device_name() != "cpu"
    if torch.distributed.get_world_size(group) == 1:
        with naming_the_object():
            return Shard(pieces, weights, config, device, gradient_dtype, rule=rule, from_far=from_far)
    own_cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, own_cores, group=group)
    earlier_ranks = everyone[: torch.distributed.get_rank(group)]
    among = earlier_ranks.count(own_cores), everyone.count(own_cores)
    with naming_the_object():
        config = config.for_rank(torch.distributed.get_rank())
        return Shard(pieces, weights, config, device, gradient_dtype, among, rule, from_far)


@dataclass(frozen=True)
class UnnamedModel:
    """A model's file under its partial name, as rank 0 has written it.

    Attributes:
        path: Its name when it is whole.
        starts: Where each flat tensor of weights is to be written, None for one that the file does not have; empty
            if all weights have been written.
        identity: Inode, size and time of change: another rank that sees the same ones sees the same file.
    """

    path: str
    starts: Sequence[int | None]
    identity: tuple[int, ...]


class OffloadedOptimizer:
    """Mixed into DeepSpeed's optimizer: its state is in `shard`.

    State is *lent* to DeepSpeed while its flat masters and the torch optimizer have all of it in memory, where
    DeepSpeed's own code can save or load it (`_in_memory`).

    Args:
        arguments: DeepSpeed's.
        offload_config: Tiers and budgets of each rank.
        names: Name of each parameter (older versions of DeepSpeed do not give them to their optimizer).
        keywords: DeepSpeed's.

    Attributes:
        shard: State and update of this rank.
        updates_early: Whether updates can be made during backward: gradients are reduced there, and new weights have
            memory to wait in.
    """

    shard: Shard
    optimizer: Any
    dp_process_group: Any
    norm_for_param_grads: dict[Any, Any]
    is_gradient_accumulation_boundary: Any
    _monitor: Callable[[], Any] = staticmethod(lambda: None)
    _flats: list[torch.Tensor]
    _lent: list[FlatState] | None = None
    loss_scale: Any
    overflow: bool
    _gradient_factor = 1.0
    _saved_steps: Mapping[str, int] | None = None
    _masters_reloaded = False
    _leaves_state_out = False
    _left_out_state: list[FlatState] | None = None
    _unnamed_model: UnnamedModel | None = None
    behind: SavesBehind | None = None
    is_saved_behind = False
    """Whether the tag that was saved last becomes whole in the background, while training goes on."""
    sigterm: SigtermHandler | None = None
    updates_early = True
    _names_latest: bool | None = None
    """Whether `latest` is to name the tag that is being saved; None if no save in the background is under way."""
    _layout = ""
    _loading_folder = ""

    def __init__(
        self, *arguments: Any, offload_config: OffloadConfig, names: Mapping[Any, str], **keywords: Any
    ) -> None:
        self._offload_config = offload_config
        self._names = names
        self._auto = AutoOverlap()
        super().__init__(*arguments, **keywords)
        self._announcer = Announcer(self.optimizer, group_values, self.shard, self._auto.pace)

    # What users touch

    @property
    def offload(self) -> Engine:
        """The engine that holds this rank's state."""
        engine: Engine = self.shard.engine
        return engine

    @property
    def plan(self) -> Any:
        """What lives where; print it."""
        return self.shard.engine.plan

    def metrics(self) -> dict[str, float]:
        """Return this rank's last step as a flat dict; see `offload.Engine.metrics`."""
        figures: dict[str, float] = self.shard.engine.metrics()
        return figures

    def report_to(self, engine: Any) -> None:
        """Write metrics to the monitor of a DeepSpeed engine after every step."""
        self._monitor = weakref.ref(engine)

    # The update

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Make DeepSpeed's step, timed for `overlap="auto"`."""
        self._end_lending()  # in case an interrupt has left it with DeepSpeed
        began_s = self._auto.pace.begin_step()
        result = super().step(*arguments, **keywords)  # type: ignore[misc]
        self._auto.pace.end_call(began_s)
        if self._offload_config.overlap == "auto":
            ways = {"forward": self.can_go_on, "backward": self.updates_early}
            self._auto.after_step(self.offload, [self.dp_process_group], told_on(self.dp_process_group), **ways)
        if self.behind is not None and not self.overflow:
            self.note_weights()
        return result

    @property
    def can_go_on(self) -> bool:
        """Whether steps may go on into the next forward pass: below ZeRO-3 "auto" has none that waits for weights."""
        return self._offload_config.overlaps_forward

    @property
    def _saves_in_background(self) -> bool:
        """Whether the save under way goes on after `save_checkpoint` has returned."""
        return self._names_latest is not None

    @property
    def _is_boundary(self) -> bool:
        """Whether the micro-step under way is the last before a step."""
        boundary = self.is_gradient_accumulation_boundary
        return bool(boundary() if callable(boundary) else boundary)

    def _note_arrival(self, number: int) -> bool:
        """Announce that a piece's reduced gradient comes; return whether its backward pass is the last of a step."""
        is_last = self._is_boundary
        self._announcer.arrives(self.offload.gradients, number, is_last=is_last, scale=float(self.loss_scale))
        return is_last

    def _on_all_ranks(self, work: Callable[[], _T]) -> _T:
        """Do this rank's work; if that raises on any rank, raise on all. Collective."""
        result: _T = on_all_ranks(work, self.dp_process_group)
        return result

    def _any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(greatest(flag, self.dp_process_group))

    def _update_all(self) -> None:
        """Run the engine's step over all of this rank's pieces, then report it. Collective."""
        groups, order = group_values(self.optimizer), self._use_order()
        self._on_all_ranks(lambda: self.shard.step(groups, self._gradient_factor, float(self.loss_scale), order))
        self._report()

    def _use_order(self) -> Mapping[int, int] | None:
        """Return the order in which forward uses pieces, if a step goes on into it."""
        return None

    def hook_model(self, model: torch.nn.Module) -> None:
        """Prepare steps to go on into a model's next forward pass, if configured. Nothing here: ZeRO-3 needs none."""

    def finish(self) -> None:
        """Wait until the last step is over, if it goes on into the next forward pass."""
        self.offload.finish()

    def _norms(self) -> dict[str, torch.Tensor]:
        """Return the norms of this rank's gradients by name, as DeepSpeed keeps them."""
        norms = self._on_all_ranks(self.shard.norms)
        return {name: torch.tensor(norm, dtype=torch.float64, device="cpu") for name, norm in norms.items()}

    def _report(self) -> None:
        """Write the step's metrics to the engine's monitor, on rank 0."""
        engine = self._monitor()
        monitor = getattr(engine, "monitor", None)
        if monitor is not None and monitor.enabled and torch.distributed.get_rank() == 0:
            samples = engine.global_samples
            monitor.write_events(
                [(f"Train/Offload/{name}", value, samples) for name, value in self.metrics().items()]
            )

    # State in DeepSpeed's layout, for its own checkpoint code

    def _lend_state(self, states: list[FlatState]) -> None:
        """Put state where DeepSpeed keeps it: into the flat masters and the torch optimizer's state."""
        for flat, state in zip(self._flats, states, strict=True):
            flat.grad = None
            flat.data = state.master
            self.optimizer.state[flat] = {"step": state.step, **state.moments}

    def _read_back(self) -> list[FlatState]:
        """Return the state that was lent, as DeepSpeed has loaded or changed it."""
        states = []
        for flat in self._flats:
            state = self.optimizer.state.get(flat, {})
            numel = flat.numel()
            moments = {name: _moment_or_zeros(state.get(name), numel) for name in self.shard.names[1:]}
            states.append(FlatState({"master": flat.data.float(), **moments}, int(state.get("step", 0))))
        return states

    @property
    def flat_weights(self) -> Sequence[torch.Tensor]:
        """The flat tensors of all ranks' weights, where each rank has a copy of them (ZeRO-1 and 2); else none."""
        return ()

    def note_weights(self) -> None:
        """Note that weights equal their rounded masters now."""

    def rounded_weights(self) -> Sequence[torch.Tensor]:
        """Return all trained weights if they are unchanged since the last `note_weights`; else none."""
        return ()

    def _all_parameters(self) -> Iterable[Any]:
        """Return the parameters of all groups, those that other ranks have included."""
        raise NotImplementedError

    def restore_placeholders(self) -> None:
        """Let DeepSpeed's flat masters be placeholders again, as they are when no state is lent."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _in_memory(self) -> Iterator[list[FlatState]]:
        """Lend all state to DeepSpeed while this context lasts; without memory for it where a save leaves it out."""
        if self._lent is not None:
            yield self._lent
            return
        self.finish()
        self._lent = self.shard.without_memory() if self._leaves_state_out else self.shard.export()
        try:
            self._lend_state(self._lent)
            yield self._lent
        finally:
            try:
                self._end_lending()
            except BaseException:  # a Ctrl-C
                self._end_lending()
                raise

    def _end_lending(self) -> None:
        """End lending, if state is lent: DeepSpeed's tensors are placeholders again, and have no state."""
        if self._lent is not None:
            self.restore_placeholders()
            self.optimizer.state.clear()
            self._lent = None

    def _load_with(self, load: Callable[[], None], *, keep_steps: bool = False) -> None:
        """Let DeepSpeed load state into memory, then move it into the shard; `keep_steps` keeps its step counts."""
        steps = self.shard.steps() if keep_steps else None
        self._masters_reloaded = False
        with self._in_memory():
            load()
            states = self._read_back()
            if steps is None:
                steps = dict(self._saved_steps or {})
            self.shard.load(states, steps)
        self._saved_steps = None
        if self._masters_reloaded:
            self.shard.reload_masters()

    def _load_in_place(self, stub: InPlace, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a checkpoint of layout "in_place": DeepSpeed loads what its file has besides, the shard the state."""

        def load_part() -> None:
            rank = torch.distributed.get_rank()
            with self.offload.checkpoints.open(os.path.join(self._loading_folder, in_place.FOLDER)) as checkpoint:
                if checkpoint.id != stub.id:
                    raise CheckpointError(
                        f"{self._loading_folder} is not whole: its files are of several checkpoints"
                    )
                trained = {self._names[parameter] for parameter in self._all_parameters()}
                names = [name for name in checkpoint.names if name not in trained]
                if untrained := [name for name in names if checkpoint.step_of(name)]:
                    more = " and others" if len(untrained) > 1 else ""
                    raise CheckpointError(
                        f"{self._loading_folder} has state of {untrained[0]}{more}, which no parameter group has: "
                        "freeze it after deepspeed.initialize, not before"
                    )
                load(Frame.decode(checkpoint.extra(rank)).without_state())
                self.shard.load_in_place(checkpoint, rank, torch.distributed.get_world_size())

        self._masters_reloaded = False
        self._on_all_ranks(load_part)
        if self._masters_reloaded:
            self.shard.reload_masters()

    def _restore_from_bit16_weights(self) -> None:
        """DeepSpeed's call when a load has changed weights: take the masters from them."""
        self._masters_reloaded = True
        self.shard.reload_masters()

    def stream_checkpoints(self, engine: Any) -> None:
        """Replace two methods of a DeepSpeed engine, so that it saves without a copy of the state in memory."""
        save_model, save_state = engine._save_checkpoint, engine._save_zero_checkpoint

        # Only rank 0 writes the model; the others wait in the collective that saves state: its error must reach them.
        def save_checkpoint(save_path: str, tag: str, *arguments: Any, **keywords: Any) -> None:
            self.finish()
            self._end_lending()
            save = functools.partial(save_model, save_path, tag, *arguments, **keywords)
            if self._saves_in_background:  # a tag may be saved again: new weights must not lie beside old state
                self._on_all_ranks(lambda: set_aside(engine._get_zero_ckpt_name(save_path, tag)))
            if self.flat_weights and stream.can_stream(engine.checkpoint_engine):
                self._save_model(save, engine, os.path.abspath(engine._get_ckpt_name(save_path, tag)))
            else:
                self._on_all_ranks(save)

        def save_zero_checkpoint(save_path: str, tag: str) -> None:
            if self.behind is None or not self._saves_in_background:
                self._on_all_ranks(lambda: self._save(save_state, engine, save_path, tag))
            else:
                self._save_behind(self.behind, save_state, engine, save_path, tag)

        engine._save_checkpoint, engine._save_zero_checkpoint = save_checkpoint, save_zero_checkpoint

    def save_by_engine(self, engine: Any, saving: Saving) -> None:
        """Replace a DeepSpeed engine's `save_checkpoint`: it pins state that lies on paths, and may return then.

        Raises:
            ConfigError: State is to stay on the paths, and ranks save to folders of their own or keep no checkpoint.
        """
        self._layout = saving.layout
        if saving.layout == "in_place" and self._offload_config.paths and not self._offload_config.checkpoints:
            NONE_KEPT.refuse("multi_tier_offload.checkpoints_kept", 0)
        if saving.layout == "in_place" and engine.use_node_local_storage():
            SAVED_APART.refuse("multi_tier_offload.checkpoint.layout", saving.layout)
        if not self._offload_config.paths and saving.layout == "stock":
            log.warning("saves wait until they are whole: without paths there is nothing that versions are pinned on")
            return
        self.behind = behind = SavesBehind(self.shard, torch.distributed.get_rank(), self._on_all_ranks)
        self.note_weights()
        save, load = engine.save_checkpoint, engine.load_checkpoint

        def load_checkpoint(*arguments: Any, **keywords: Any) -> Any:
            self.wait_checkpoint()  # before DeepSpeed reads `latest`
            result = load(*arguments, **keywords)
            self.note_weights()
            return result

        def save_checkpoint(
            save_dir: str,
            tag: Any = None,
            client_state: Any = MappingProxyType({}),
            save_latest: bool = True,
            *arguments: Any,
            **keywords: Any,
        ) -> Any:
            self.wait_checkpoint()
            client_state = dict(client_state)
            waits = saving.wait or _is_driven_by_accelerate()
            can_stream = stream.can_stream(engine.checkpoint_engine)
            if saving.layout == "in_place" and not can_stream:
                log.warning('the layout is "stock": "in_place" is for DeepSpeed\'s default writer')
            if (waits and saving.layout == "stock") or not can_stream:
                return save(save_dir, tag, client_state, save_latest, *arguments, **keywords)
            self.is_saved_behind = True
            before, self._names_latest = self._names_latest, save_latest
            try:
                result = save(save_dir, tag, client_state, False, *arguments, **keywords)
            except BaseException:
                behind.cancel()
                if self._unnamed_model is not None:
                    discard(self._unnamed_model.path)
                raise
            finally:
                self._names_latest, self._unnamed_model = before, None
            if waits:
                self.wait_checkpoint()
            return result

        engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint

    def wait_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background is whole. Collective.

        Raises:
            CheckpointError: On all ranks, if one could not write its part; `latest` names the checkpoint before.
        """
        if self.behind is not None:
            self.behind.wait()

    def refuse_other_ranks(self, engine: Any) -> None:
        """Replace a DeepSpeed engine's methods that load: refuse state of another number of ranks, saying what to do.

        If one rank cannot read its file, all raise: the others would wait for it.
        """
        load, read = engine._load_checkpoint, engine._get_all_zero_checkpoints

        def load_checkpoint(load_dir: str, tag: str, *arguments: Any, **keywords: Any) -> Any:
            self.finish()
            self._end_lending()
            self._loading_folder = os.path.join(load_dir, tag)
            with_state = keywords.get("load_optimizer_states", True) and not keywords.get("load_module_only", False)
            if with_state and not engine.load_universal_checkpoint():
                # The greatest of all ranks' counts: each node may have only the files of its own ranks.
                saved_ranks = greatest(_ranks_by_files(os.path.join(load_dir, tag)), self.dp_process_group)
                ranks = engine.seq_dp_world_size
                if saved_ranks not in (0, ranks):  # files may be missing, or left by an earlier save: ask the model's
                    in_model = _ranks_by_model(engine._get_ckpt_name(load_dir, tag))
                    saved_ranks = greatest(in_model, self.dp_process_group) or saved_ranks
                if saved_ranks not in (0, ranks):
                    raise _other_ranks(os.path.join(load_dir, tag), saved_ranks, ranks)
            return load(load_dir, tag, *arguments, **keywords)

        engine._load_checkpoint = load_checkpoint
        engine._get_all_zero_checkpoints = lambda *given: self._on_all_ranks(lambda: read(*given))

    def _save_model(self, save: Callable[[], None], engine: Any, path: str) -> None:
        """Save the model's file, in the place of DeepSpeed's method. Collective.

        In a save that goes on in the background, weights that equal their rounded masters are left out as holes; the
        writer of state fills them later, and the file keeps its partial name until then. If weights of one rank
        differ, all weights are written now.
        """
        is_behind = self._saves_in_background and not engine.use_node_local_storage()
        left_out = self.rounded_weights() if is_behind and self.behind is not None and self.behind.rounds else ()
        if self._any(not left_out):
            left_out = ()

        def write() -> None:
            if is_behind and torch.distributed.get_rank() == 0:
                set_aside(path)
            with _in_partial(engine, "_get_ckpt_name", path):
                with stream.without_data(engine.checkpoint_engine) as saved:
                    save()
                starts_of_saved = [fill(partial_of(path), state, left_out) for state in saved]
            for storage_starts in starts_of_saved:  # one file on rank 0, none on others
                if storage_starts is None:
                    log.warning("weights are saved to %s in a way that cannot be streamed", path)
                    discard(path)
                    save()
                elif is_behind:
                    starts = [start_of(storage_starts, flat) for flat in self.flat_weights] if left_out else []
                    self._unnamed_model = UnnamedModel(path, starts, _identity(partial_of(path)))
                else:
                    os.rename(partial_of(path), path)
                    discard(path)

        try:
            self._on_all_ranks(write)
        except BaseException:
            if torch.distributed.get_rank() == 0:
                discard(path)
            raise

    def _save(self, save: Callable[[str, str], None], engine: Any, save_path: str, tag: str) -> None:
        """Save this rank's file, and wait: DeepSpeed writes it with holes for state, which is then streamed there."""
        if not stream.can_stream(engine.checkpoint_engine):
            save(save_path, tag)
            return
        path = engine._get_zero_ckpt_name(save_path, tag)
        starts = self._save_without_state(save, engine, path, save_path, tag)
        if starts is None:
            save(save_path, tag)
        else:
            stream.write_state({path: starts}, self.shard, lambda take, _: self.shard.engine.state.visit(take))

    def _save_without_state(
        self, save: Callable[[str, str], None], engine: Any, path: str, save_path: str, tag: str
    ) -> stream.Starts | None:
        """Let DeepSpeed write its file with holes for state; return where the holes are, None if that is unknown."""
        self._leaves_state_out = True
        try:
            with stream.without_data(engine.checkpoint_engine) as saved:
                save(save_path, tag)
        finally:
            self._leaves_state_out = False
            lent, self._left_out_state = self._left_out_state, None
        starts = None
        if lent is not None:
            tensors = [tensor for state in lent for tensor in state.tensors.values()]
            storage_starts = fill(path, saved[0], tensors)
            starts = None if storage_starts is None else stream.starts_of(storage_starts, lent)
        if starts is None:
            log.warning("state is saved to %s in a way that cannot be streamed, so it is copied first", path)
        return starts

    def _save_behind(
        self, behind: SavesBehind, save: Callable[[str, str], None], engine: Any, save_path: str, tag: str
    ) -> None:
        """Pin state and begin to write it in the background; training may go on when this returns. Collective."""
        publishes = bool(self._names_latest)
        folder = os.path.abspath(save_path)  # the program may change its directory meanwhile
        path, model_path = engine._get_zero_ckpt_name(folder, tag), engine._get_ckpt_name(folder, tag)
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, (path, uuid.uuid4().hex, self._unnamed_model))
        paths, (id, *_), (unnamed, *_) = zip(*of_ranks, strict=True)
        model = self._own_part_of_model_file(unnamed, model_path)

        def begin() -> None:
            with _in_partial(engine, "_get_zero_ckpt_name", path):
                starts = self._save_without_state(save, engine, partial_of(path), folder, tag)
                frame = None
                if self._layout == "in_place":
                    if starts is None:
                        raise CheckpointError(f'where state lies in {path} cannot be told: use the layout "stock"')
                    frame = stream.frame_of(partial_of(path), os.path.basename(path), starts, self.shard)
                if starts is None:
                    save(folder, tag)
            if model is not None and model.starts:
                if starts is None:  # masters are not pinned then, so the weights are written now
                    stream.write_weights(partial_of(model.path), model.starts, self.shard.weights)
                    model.starts = []
                model.digests = [stream.digest(weight) for weight in self.shard.weights]
            synced = [model_path] if os.path.exists(model_path) else []
            behind.begin(PendingTag(folder, tag, path, paths, starts, frame, model, synced, publishes, id))

        self._on_all_ranks(begin)

    def _own_part_of_model_file(self, unnamed: UnnamedModel | None, path: str) -> SharedModel | None:
        """Return this rank's part of a model's file that rank 0 has written without weights; None if it has none.

        If ranks do not see the same file, rank 0 writes all weights. Collective.
        """
        rank = torch.distributed.get_rank()
        if unnamed is None:
            return None
        starts, flats = unnamed.starts, self.flat_weights
        if starts and self._any(_identity(partial_of(path)) != unnamed.identity):
            self._on_all_ranks(lambda: stream.write_weights(partial_of(path), starts, flats) if rank == 0 else None)
            starts = []
        if not starts and rank > 0:
            return None
        own_parts = zip(starts, flats, self.shard.weights, strict=True) if starts else ()
        return SharedModel(
            path,
            [None if start is None else start + part.data_ptr() - flat.data_ptr() for start, flat, part in own_parts],
        )

    def _add_steps(self, saved: dict[str, Any], states: list[FlatState]) -> dict[str, Any]:
        """Add step counts by name, which DeepSpeed does not have, to what it is about to save."""
        saved[STEPS] = self.shard.steps()
        if self._leaves_state_out:
            self._left_out_state = states
        return saved

    # What DeepSpeed calls

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether a gradient of any rank has an element that is not finite."""
        return self._any(not self._on_all_ranks(self.shard.is_finite))

    def independent_gradient_partition_epilogue(self) -> None:
        """DeepSpeed's call when it has reduced the last gradients of a backward pass."""
        super().independent_gradient_partition_epilogue()  # type: ignore[misc]
        self.offload.gradients.end_backward()

    def reset_cpu_buffers(self) -> None:
        """DeepSpeed's call at the end of a step, taken or skipped."""
        super().reset_cpu_buffers()  # type: ignore[misc]
        self.shard.close_window()

    # Phases

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        *arguments: Any,
        non_blocking: bool = False,
        **keywords: Any,
    ) -> None:
        """Give memory back between phases: `Engine.park` for masters and moments, DeepSpeed's own way for the rest.

        State at home in host memory stays there, as the config says; `engine.optimizer.offload.park()` moves it to
        the paths, too. Gradients stay in memory, where the update reads them; those of weights on a GPU are freed
        once a step has used them.

        Args:
            include: DeepSpeed's `OffloadStateTypeEnum`s; None for all.
            arguments: DeepSpeed's further ones, for what it moves.
            non_blocking: Whether to go on before memory has been given back.
            keywords: As `arguments`.
        """
        self.finish()
        kinds = import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
        wanted = set(kinds if include is None else include)
        if wanted & {kinds.optim_states, kinds.hp_params}:
            self.shard.forget_used()
            self.offload.park(keep_host=True, wait=not non_blocking)
        by_deepspeed = wanted - {kinds.optim_states, kinds.hp_params, kinds.lp_grads}
        if kinds.lp_params in by_deepspeed:
            self._release_weights()
        if by_deepspeed:
            super().offload_states(by_deepspeed, *arguments, non_blocking=non_blocking, **keywords)  # type: ignore[misc]

    def reload_states(self, non_blocking: bool = False) -> None:
        """Take memory again for what DeepSpeed has moved, and for the engine's state, which is read when used."""
        super().reload_states(non_blocking=non_blocking)  # type: ignore[misc]
        self._rebind_weights()
        self.offload.unpark()

    def _release_weights(self) -> None:
        """Drop references to the flat tensors of weights: DeepSpeed is about to move them."""
        self.shard.weights.clear()

    def _rebind_weights(self) -> None:
        """Take the flat tensors of weights from DeepSpeed again, after it may have moved them."""
        raise NotImplementedError

    def honour_include(self, engine: Any) -> None:
        """Let an engine pass masters and moments to `offload_states`, which it omits as they are offloaded."""
        engine._refine_include_states = lambda include: include

    def overlap_forward(self, *arguments: Any, **keywords: Any) -> None:
        """Raise `ConfigError`: DeepSpeed's config says whether steps go on into forward."""
        DEEPSPEED_FORWARD.refuse("overlap_forward", "called")

    def destroy(self) -> None:
        """Wait for a checkpoint that is being written, then free memory and files: the engine's, then DeepSpeed's."""
        if self.behind is not None:
            self.behind.close()
        if self.sigterm is not None:
            self.sigterm.restore()
        self.shard.close()
        super().destroy()  # type: ignore[misc]


@contextlib.contextmanager
def _in_partial(engine: Any, method: str, path: str) -> Iterator[None]:
    """Let an engine's `method`, which names a file to save, return its partial name; delete the file on an error."""
    setattr(engine, method, lambda *given: partial_of(path))
    try:
        yield
    except BaseException:
        discard(path)
        raise
    finally:
        vars(engine).pop(method, None)


def _identity(path: str) -> tuple[int, ...]:
    """Return what tells a file from any other: inode, size, time of change; nothing if the file is not there."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _is_driven_by_accelerate() -> bool:
    """Return whether Accelerate drives DeepSpeed: it deletes older checkpoints as soon as a save returns."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return "deepspeed" in str(getattr(state, "_shared_state", {}).get("distributed_type", "")).lower()


def _ranks_by_files(folder: str) -> int:
    """Return how many ranks have saved state in a tag's folder, by the names of its files; 0 if none has."""
    try:
        names = os.listdir(folder)
    except OSError:  # DeepSpeed says that it is not there
        return 0
    matches = [re.fullmatch(r"(?:.*_)?zero_pp_rank_(\d+)_mp_rank_\d+_?optim_states\.pt", name) for name in names]
    return max((int(name[1]) + 1 for name in matches if name), default=0)


def _ranks_by_model(path: str) -> int:
    """Return how many ranks have saved a model, as its file says; 0 if the file cannot be read."""
    with contextlib.suppress(Exception):
        return int(torch.load(path, "meta", weights_only=False, mmap=True)["dp_world_size"])
    return 0


def _other_ranks(folder: str, saved_ranks: int, ranks: int) -> CheckpointError:
    """Return the error for a folder that another number of ranks has saved."""
    universal = f"{folder.rstrip(os.sep)}_universal"
    return CheckpointError(
        f"{folder} was saved by {saved_ranks} ranks, and DeepSpeed cannot give its state to {ranks}; nothing was "
        "loaded. Make a universal checkpoint of it, `python -m deepspeed.checkpoint.ds_to_universal "
        f"--inject_missing_state --input_folder {shlex.quote(folder)} --output_folder {shlex.quote(universal)}`, "
        "and load the tag "
        f'"{os.path.basename(universal)}" with "checkpoint": {{"load_universal": true}} in the config'
    )


def _moment_or_zeros(moment: Any, numel: int) -> torch.Tensor:
    """Return a loaded moment; zeros if there is none, as in a checkpoint from before the first step."""
    if isinstance(moment, torch.Tensor) and moment.numel() == numel:
        return moment
    return torch.zeros(numel, dtype=torch.float32, device="cpu")
