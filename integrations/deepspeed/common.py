"""`OffloadedOptimizer`: what our optimizers of all ZeRO stages share. Updates, norms, checkpoints, refusals.

A rank's state is in its `Shard`, not in DeepSpeed's tensors. DeepSpeed's own checkpoint code expects it there, so the
state is *lent* to it for a time; or it saves files with *holes* for state, which is then written into them from where
it lies (`stream.py`). A file keeps a *partial* name, which nothing loads, until it is whole. A save *behind* training
is completed in the background (`behind.py`).

A method that "Replaces" one of a DeepSpeed engine is set on that engine alone, and calls the one that was there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
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
from offload.checkpoint.marker import BEGUN, Mark, mark_of
from offload.checkpoint.torch_files import Places, fill, start_of
from offload.combinations import DEEPSPEED_FORWARD, NONE_KEPT
from offload.integrations import shared
from offload.integrations.deepspeed import in_place, stream
from offload.integrations.deepspeed.behind import (
    PendingTag,
    SavesBehind,
    discard_partial,
    discard_partials,
    name_file,
    name_latest,
    partial_of,
    set_aside,
)
from offload.integrations.deepspeed.in_place import Frame, InPlace
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.ranks import exchange_device, max_over_ranks, on_all_ranks
from offload.integrations.deepspeed.settings import Saving, naming_object_in_errors
from offload.integrations.deepspeed.shard import FlatState, Shard, group_values, rule_of
from offload.integrations.deepspeed.stream import SharedModel
from offload.optim.figures import StepFigures
from offload.optim.hiding import Announcer, AutoOverlap
from offload.optim.preemption import SigtermHandler
from offload.rules import UpdateRule

log = logging.getLogger("offload")

STEPS = "offload_steps"
"""Our key in DeepSpeed's optimizer checkpoints: updates of each parameter by name (DeepSpeed has one number)."""


_T = TypeVar("_T")


def warn_of_large_buckets(engine: Any, config: OffloadConfig) -> None:
    """Warn of bucket sizes so large that DeepSpeed reduces all gradients, or gathers all weights, at once."""
    # A parameter that ZeRO-3 has cut may have no elements itself between uses; it has its size as `ds_numel`.
    model_numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())

    def warn_if_large(key: str, numel: int, where: str) -> None:
        """Warn if a bucket of `numel` elements has room for the whole model."""
        if numel >= model_numel:
            text = "%s %d holds all %d parameters: little is hidden %s; give less"
            log.warning(text, key, numel, model_numel, where)

    if config.overlaps_backward:
        warn_if_large("reduce_bucket_size", engine.zero_reduce_bucket_size(), "during backward")
    if config.overlaps_forward and engine.zero_optimization_stage() == 3:
        warn_if_large("stage3_prefetch_bucket_size", engine.zero_prefetch_bucket_size(), "in forward")


def find_device(weights: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the accelerator that a rank's weights are on; None for the CPU."""
    device = next((weight.device for weight in weights), torch.device("cpu"))  # all are on one device
    return None if device.type == "cpu" else device


def make_shard(
    pieces: Sequence[Piece],
    weights: Sequence[torch.Tensor],
    config: OffloadConfig,
    group: Any,
    gradient_dtype: torch.dtype,
    rule: UpdateRule,
) -> Shard:
    """Make one rank's shard, with directories of its own.

    Ranks that may run on the same cores divide these cores, and the memory nodes, among each other. Collective over
    `group`, the ranks among which state is divided; other arguments as of `Shard`.
    """
    device = find_device(weights)
    # Gradients come from DeepSpeed's accelerator even if the weights are in host memory.
    from_accelerator = import_module("deepspeed.accelerator").get_accelerator().device_name() != "cpu"
    ranks = torch.distributed.get_world_size(group)
    among: tuple[int, int] | None = None  # this rank's number among those with its cores, and their count
    if ranks > 1:
        own_cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
        cores_by_rank: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(cores_by_rank, own_cores, group=group)
        cores_of_earlier_ranks = cores_by_rank[: torch.distributed.get_rank(group)]
        among = cores_of_earlier_ranks.count(own_cores), cores_by_rank.count(own_cores)
    with naming_object_in_errors():
        if ranks > 1:
            # Not the rank in the group: ranks of other groups may use the same paths.
            config = config.for_rank(torch.distributed.get_rank())
        return Shard(pieces, weights, config, device, gradient_dtype, among, rule, from_accelerator)


@dataclass(frozen=True)
class UnnamedModel:
    """A model's file that rank 0 has written, all of it or all but the weights, and that has its partial name still.

    Attributes:
        path: Its path when it is whole.
        starts: The byte at which each flat tensor of weights is to be written, None for one that the file does not
            have; empty if all weights have been written.
        identity: Inode, size and time of change: another rank that sees the same ones sees the same file.
    """

    path: str
    starts: Sequence[int | None]
    identity: tuple[int, ...]


class OffloadedOptimizer(StepFigures):
    """A mixin for DeepSpeed's ZeRO optimizers, whose methods it overrides: their state is in `shard`.

    Usually DeepSpeed's flat masters are placeholders, and the torch optimizer has no state. While state is *lent* to
    DeepSpeed, both have all of it in memory, where DeepSpeed's own code can save or load it; see `_with_state_lent`.

    Args:
        arguments: DeepSpeed's.
        offload_config: Tiers and budgets of each rank.
        names: Name of each parameter (older versions of DeepSpeed do not give them to their optimizer).
        keywords: DeepSpeed's.

    Attributes:
        shard: State and update of this rank.
        may_update_during_backward: Whether updates can be made during backward: gradients are reduced there, and
            there is memory for new weights until the step.
    """

    shard: Shard
    optimizer: Any
    dp_process_group: Any
    norm_for_param_grads: dict[Any, Any]
    is_gradient_accumulation_boundary: Any
    _monitored_engine: Callable[[], Any] = staticmethod(lambda: None)  # or a weak reference to a DeepSpeed engine
    _flats: list[torch.Tensor]  # DeepSpeed's flat masters
    _lent: list[FlatState] | None = None  # the state that DeepSpeed has now; None if it is the shard's
    loss_scale: Any
    _global_grad_norm: Any
    overflow: bool
    _gradient_factor = 1.0  # of loss scale and clipping, as DeepSpeed has computed it
    _saved_steps: Mapping[str, int] | None = None  # in the file that is being loaded; None if it has none
    _has_reloaded_masters = False  # whether the load under way has taken masters from the weights
    _saves_without_state = False  # whether the file that is being saved gets holes for state
    _left_out_state: list[FlatState] | None = None  # what stands for state in that file
    _unnamed_model: UnnamedModel | None = None  # on rank 0, of the save under way
    behind: SavesBehind | None = None  # None if all saves are DeepSpeed's own, which wait until they are whole
    is_saved_behind = False
    """Whether the tag that was saved last becomes whole in the background, while training goes on."""
    sigterm: SigtermHandler | None = None  # None without `commit_on_sigterm`
    may_update_during_backward = True
    _names_latest: bool | None = None
    """Whether `latest` is to name the tag that is being saved; None if no save in the background is under way."""
    _checkpoint_layout = ""  # of saves by `behind`; "" without
    _loading_folder = ""  # the folder of the tag that is being loaded, or was loaded last

    def __init__(
        self, *arguments: Any, offload_config: OffloadConfig, names: Mapping[Any, str], **keywords: Any
    ) -> None:
        # DeepSpeed's constructor calls methods of ours, which use these and make the shard.
        self._offload_config = offload_config
        self._names = names
        self._auto = AutoOverlap()
        self._begin_figures()
        super().__init__(*arguments, **keywords)
        self._announcer = Announcer(self.optimizer, group_values, self.shard, self._auto.pace)

    # What users touch

    @property
    def offload(self) -> Engine:
        """The engine that holds this rank's state."""
        engine: Engine = self.shard.engine
        return engine

    @property
    def _engine(self) -> Engine:
        """The engine, for figures: those of this rank."""
        return self.offload

    @property
    def _gradient_norm(self) -> float:
        """The norm of all ranks' gradients, before clipping, as DeepSpeed has computed it."""
        norm = self._global_grad_norm
        return math.nan if norm is None else float(norm)

    @property
    def _hidden_in(self) -> tuple[str, ...]:
        """Where steps are hidden now; see `StepFigures`."""
        return self._auto.hidden_in(self.offload, forward=self.may_overlap_forward)

    def report_to(self, engine: Any) -> None:
        """Write metrics to the monitor of a DeepSpeed engine after every step."""
        self._monitored_engine = weakref.ref(engine)

    # The update

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Make DeepSpeed's step, timed for `overlap="auto"`, which may choose another mode for the next steps."""
        self._end_lending()  # in case an interrupt has left state with DeepSpeed
        self.finish()  # the step before, which may still go on
        began_s = self._auto.pace.begin_step()
        result = super().step(*arguments, **keywords)  # type: ignore[misc]
        self._auto.pace.end_call(began_s)
        if self._offload_config.overlap == "auto":
            possible = {"forward": self.may_overlap_forward, "backward": self.may_update_during_backward}
            group = self.dp_process_group
            self._auto.after_step(self.offload, [group], exchange_device(group), **possible)
        if self.behind is not None and not self.overflow:
            self.note_weights_are_rounded_masters()  # the step has just written them
        if not self.offload.is_pending:  # else `finish` reports it
            self._report_if_due()
        return result

    @property
    def may_overlap_forward(self) -> bool:
        """Whether steps may go on into the next forward pass; with "auto" in ZeRO-3 alone, which overrides this."""
        return self._offload_config.overlaps_forward

    @property
    def _saves_in_background(self) -> bool:
        """Whether `behind` completes the save under way, in the background; `save_checkpoint` may wait for it."""
        return self._names_latest is not None

    @property
    def _is_boundary(self) -> bool:
        """Whether the micro-step under way is the last before a step."""
        boundary = self.is_gradient_accumulation_boundary  # a method or an attribute, by DeepSpeed's version
        return bool(boundary() if callable(boundary) else boundary)

    def _announce_arrival(self, number: int) -> bool:
        """Tell the engine that a piece's reduced gradient is about to arrive; return whether it is the last one.

        That is so in the last micro-step before a step. With a pass's first gradient the engine is also told what the
        step would use now; see `Announcer`.
        """
        is_last = self._is_boundary
        self._announcer.arrives(self.offload.gradients, number, is_last=is_last, scale=float(self.loss_scale))
        return is_last

    def _on_all_ranks(self, work: Callable[[], _T]) -> _T:
        """Do this rank's work; if it raises on any rank, raise on all. Collective."""
        result: _T = on_all_ranks(work, self.dp_process_group)
        return result

    def _on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective."""
        return bool(max_over_ranks(flag, self.dp_process_group))

    def _run_engine_step(self) -> None:
        """Run the engine's step over all of this rank's pieces. Collective."""
        groups = group_values(self.optimizer)
        order = self._take_use_order()
        self._on_all_ranks(lambda: self.shard.step(groups, self._gradient_factor, float(self.loss_scale), order))
        self._is_reported = False  # `_report_if_due` reports the step, once it is over

    def _take_use_order(self) -> Mapping[int, int] | None:
        """Return in which order the last forward pass used the pieces: the position of each, by its number.

        None if the step does not go on into the next forward pass. The stages override this, and forget the order.
        """
        return None

    def hook_model(self, model: torch.nn.Module) -> None:
        """Make a model's modules wait for their weights, if steps may go on into forward.

        Nothing is done in ZeRO-3, where modules gather their weights, and wait for them then.
        """

    def finish(self) -> None:
        """Wait until the last step is over, if it goes on into the next forward pass; report it if that is due."""
        self.offload.finish()
        self._report_if_due()

    def _norms(self) -> dict[str, torch.Tensor]:
        """Return the norms of this rank's gradients by name, as DeepSpeed keeps them. Collective."""
        norms = self._on_all_ranks(self.shard.norms)
        return {name: torch.tensor(norm, dtype=torch.float64, device="cpu") for name, norm in norms.items()}

    def _report_if_due(self) -> None:
        """Report the last step, which is over, unless that was done. Rank 0 also writes to DeepSpeed's monitor."""
        if self._is_reported:
            return
        self._report_step()  # which also sets `_is_reported`
        engine = self._monitored_engine()  # None before `report_to`, and once the engine is freed
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
            flat.grad = None  # ZeRO-3's `unscale_and_clip_grads` may have left one, of one element
            flat.data = state.master
            self.optimizer.state[flat] = {"step": state.step, **state.moments}

    def _read_lent_state(self) -> list[FlatState]:
        """Return the state that was lent, for each flat tensor, as DeepSpeed has loaded or changed it.

        A load may have put other tensors in the place of those that were lent.
        """
        states = []
        for flat in self._flats:
            state = self.optimizer.state.get(flat, {})
            numel = flat.numel()
            # All names but the first, the master's.
            moments = {name: _moment_or_zeros(state.get(name), numel) for name in self.shard.names[1:]}
            states.append(FlatState({"master": flat.data.float(), **moments}, int(state.get("step", 0))))
        return states

    @property
    def flat_weights(self) -> Sequence[torch.Tensor]:
        """The flat tensors of all ranks' weights, where each rank has a copy of them (ZeRO-1 and 2); else none."""
        return ()

    def note_weights_are_rounded_masters(self) -> None:
        """Note that weights equal their rounded masters now: a save may write rounded masters in their place.

        Nothing is noted here, nor in ZeRO-3, where each rank has its own part of the weights alone.
        """

    def unchanged_weights(self) -> Sequence[torch.Tensor]:
        """Return all trained weights if none has changed since `note_weights_are_rounded_masters`; else none."""
        return ()

    def _parameters(self) -> Iterable[Any]:
        """Return the parameters of all groups, including those that other ranks update."""
        raise NotImplementedError

    def restore_placeholders(self) -> None:
        """Make DeepSpeed's flat masters placeholders again, as they are when no state is lent."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _with_state_lent(self) -> Iterator[list[FlatState]]:
        """Lend all state to DeepSpeed while this context lasts; yield it.

        Where a save leaves holes for state, tensors without memory are lent in its place. Changes are not written
        back; see `_load_by_deepspeed`.
        """
        if self._lent is not None:  # by a context around this one
            yield self._lent
            return
        self.finish()
        self._lent = self.shard.without_memory() if self._saves_without_state else self.shard.export()
        try:
            self._lend_state(self._lent)
            yield self._lent
        finally:
            try:
                self._end_lending()
            except BaseException:  # a Ctrl-C within the call, which may be repeated: end the lending all the same
                self._end_lending()
                raise

    def _end_lending(self) -> None:
        """End the lending of state, if any is lent: DeepSpeed's tensors are placeholders again."""
        if self._lent is not None:
            self.restore_placeholders()
            self.optimizer.state.clear()
            self._lent = None

    def _load_by_deepspeed(self, load: Callable[[], None], *, keep_steps: bool = False) -> None:
        """Have DeepSpeed load a checkpoint into lent memory, then write the state from there to the shard.

        Args:
            load: DeepSpeed's method.
            keep_steps: Whether the shard's step counts stay as they are; else they become those of the file.
        """
        kept_steps = self.shard.steps() if keep_steps else None
        self._has_reloaded_masters = False
        with self._with_state_lent():
            load()
            states = self._read_lent_state()
            # A piece without a count in the file gets that of its flat tensor.
            steps = dict(self._saved_steps or {}) if kept_steps is None else kept_steps
            self.shard.load(states, steps)
        self._saved_steps = None
        # If DeepSpeed has called `_restore_from_bit16_weights` within `load`, `shard.load` has undone that.
        if self._has_reloaded_masters:
            self.shard.reload_masters()

    def _load_in_place(self, stub: InPlace, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a checkpoint of layout "in_place": the shard loads the state, DeepSpeed all else of its file.

        Args:
            stub: What the rank's file has, which names the engines' checkpoint.
            load: Has DeepSpeed load an optimizer's part of its file that has no state.

        Raises:
            CheckpointError: The tag is not whole, or has state of a parameter that is in no group; on all ranks.
        """

        def load_part() -> None:
            """Load this rank's part."""
            rank = torch.distributed.get_rank()
            with self.offload.checkpoints.open(os.path.join(self._loading_folder, in_place.FOLDER)) as checkpoint:
                if checkpoint.id != stub.id:
                    raise CheckpointError(
                        f"{self._loading_folder} is not whole: its files are of several checkpoints"
                    )
                trained = {self._names[parameter] for parameter in self._parameters()}
                untrained = [name for name in checkpoint.names if name not in trained]
                lost = [name for name in untrained if checkpoint.step_of(name)]  # the others' state is fresh
                if lost:
                    more = " and others" if len(lost) > 1 else ""
                    raise CheckpointError(
                        f"{self._loading_folder} has state of {lost[0]}{more}, which no parameter group has: "
                        "freeze it after deepspeed.initialize, not before"
                    )
                load(Frame.decode(checkpoint.extra(rank)).without_state())
                self.shard.load_in_place(checkpoint, rank, torch.distributed.get_world_size())

        self._has_reloaded_masters = False
        self._on_all_ranks(load_part)
        # If DeepSpeed has called `_restore_from_bit16_weights` within `load`, `shard.load_in_place` has undone that.
        if self._has_reloaded_masters:
            self.shard.reload_masters()

    def _restore_from_bit16_weights(self) -> None:
        """Take the masters from the weights: DeepSpeed calls this when a load has changed weights."""
        # `_load_by_deepspeed` and `_load_in_place`, if one is under way, take the masters once more at its end.
        self._has_reloaded_masters = True
        self.shard.reload_masters()

    def stream_checkpoints(self, engine: Any) -> None:
        """Replace the methods of a DeepSpeed engine that save the model and this rank's state.

        The state, and weights of which each rank has a copy (`flat_weights`: ZeRO-1 and 2), are written from where
        they lie to holes of DeepSpeed's files, so that no copy of them is made in memory. In ZeRO-3, or with a
        checkpoint engine that writes files in another way, DeepSpeed's own method saves the model.
        """
        save_model, save_state = engine._save_checkpoint, engine._save_zero_checkpoint
        save_tag = engine.save_checkpoint

        def save_tag_and_name(
            save_dir: Any,
            tag: Any = None,
            client_state: Any = MappingProxyType({}),
            save_latest: bool = True,
            *arguments: Any,
            **keywords: Any,
        ) -> Any:
            """Replaces `save_checkpoint`: rank 0 writes `latest` here, so that all ranks raise if it cannot.

            DeepSpeed would write it on rank 0, and if that failed, the others would wait for ever. It still does so
            where its checkpoint engine does not write files as its default one does.
            """
            self.check_is_loaded()
            names_latest = save_latest and stream.can_stream(engine.checkpoint_engine)
            by_deepspeed = save_latest and not names_latest
            # DeepSpeed's own default of `client_state` is a dict; the default here is none.
            result = save_tag(save_dir, tag, dict(client_state), by_deepspeed, *arguments, **keywords)
            if names_latest:
                name = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed names the tag
                is_first = engine.global_rank == 0
                self._on_all_ranks(lambda: name_latest(save_dir, name) if is_first else None)
            return result

        def save_checkpoint(save_path: str, tag: str, *arguments: Any, **keywords: Any) -> None:
            """Replaces `_save_checkpoint`, which saves the model. Collective, so that rank 0's error reaches all."""
            self.finish()
            self._end_lending()  # in case an interrupt has left state with DeepSpeed
            save = functools.partial(save_model, save_path, tag, *arguments, **keywords)
            can_stream = stream.can_stream(engine.checkpoint_engine)
            own_file = engine._get_zero_ckpt_name(save_path, tag)
            if can_stream:
                is_first = engine.global_rank == 0
                self._on_all_ranks(lambda: discard_partials(os.path.dirname(own_file)) if is_first else None)
                # A tag may be saved again: its old file of state must not lie beside new weights until the new one
                # is whole.
                self._on_all_ranks(lambda: set_aside(own_file, is_kept=self._saves_in_background))
            try:
                if self.flat_weights and can_stream:
                    self._save_model_file(save, engine, os.path.abspath(engine._get_ckpt_name(save_path, tag)))
                else:
                    self._on_all_ranks(save)
            except BaseException:
                if can_stream:
                    discard_partial(own_file)  # the old file, if it was set aside and kept
                raise

        def save_zero_checkpoint(save_path: str, tag: str) -> None:
            """Replaces `_save_zero_checkpoint`, which saves this rank's state."""
            if self.behind is None or not self._saves_in_background:
                self._on_all_ranks(lambda: self._save_state_file(save_state, engine, save_path, tag))
                # All ranks have named their files. Left is the folder in which these had their partial names.
                discard_partial(engine._get_zero_ckpt_name(save_path, tag))
            else:
                self._begin_save_behind(self.behind, save_state, engine, save_path, tag)

        engine._save_checkpoint, engine._save_zero_checkpoint = save_checkpoint, save_zero_checkpoint
        engine.save_checkpoint = save_tag_and_name

    def replace_save_checkpoint(self, engine: Any, saving: Saving) -> None:
        """Replace a DeepSpeed engine's `save_checkpoint` by one that pins state on the paths: saves behind training.

        It may return once state is pinned, while the files are completed in the background. With the layout
        "in_place" the state stays where it is pinned. Without paths, and with the layout "stock", nothing is
        replaced.

        Raises:
            ConfigError: State is to stay on the paths, where no checkpoint is kept.
        """
        self._checkpoint_layout = saving.layout
        if saving.layout == "in_place" and self._offload_config.paths and not self._offload_config.checkpoints:
            NONE_KEPT.refuse("multi_tier_offload.checkpoints_kept", 0)
        if not self._offload_config.paths and saving.layout == "stock":
            log.warning("saves wait until they are whole: without paths there is nothing that versions are pinned on")
            return
        self.behind = behind = SavesBehind(self.shard, torch.distributed.get_rank(), self._on_all_ranks)
        self.note_weights_are_rounded_masters()  # the masters have just been made of the weights
        save, load = engine.save_checkpoint, engine.load_checkpoint

        def load_checkpoint(*arguments: Any, **keywords: Any) -> Any:
            """Replaces `load_checkpoint`: first wait for the save in the background, which writes `latest`."""
            self.wait_checkpoint()
            result = load(*arguments, **keywords)
            # Weights and masters are of one checkpoint, or the masters were taken from the weights. If the weights
            # are not the rounded masters all the same, `SharedModel.is_written` finds that in the next save.
            self.note_weights_are_rounded_masters()
            return result

        def save_checkpoint(
            save_dir: str,
            tag: Any = None,
            client_state: Any = MappingProxyType({}),
            save_latest: bool = True,
            *arguments: Any,
            **keywords: Any,
        ) -> Any:
            """Replaces `save_checkpoint`: `SavesBehind` completes the tag, and then writes `latest`.

            With a checkpoint engine that does not write files as DeepSpeed's own does, its own method saves.
            """
            self.wait_checkpoint()
            client_state = dict(client_state)
            waits = saving.wait or _is_driven_by_accelerate()
            can_stream = stream.can_stream(engine.checkpoint_engine)
            if saving.layout == "in_place" and not can_stream:
                log.warning('the layout is "stock": "in_place" is for DeepSpeed\'s default writer')
            is_deepspeeds = waits and saving.layout == "stock"  # its own method does just this
            if is_deepspeeds or not can_stream:
                return save(save_dir, tag, client_state, save_latest, *arguments, **keywords)
            self.is_saved_behind = True
            # While this is not None, the methods of `stream_checkpoints` leave state to `self.behind`.
            before, self._names_latest = self._names_latest, save_latest  # `before` is None, unless calls are nested
            try:
                result = save(save_dir, tag, client_state, False, *arguments, **keywords)  # without `latest`
            except BaseException:
                behind.cancel()
                if self._unnamed_model is not None:
                    discard_partial(self._unnamed_model.path)
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

    def refuse_unfit_tags(self, engine: Any) -> None:
        """Replace a DeepSpeed engine's methods that load a tag (a folder of one save): refuse unfit tags first.

        Unfit is a tag that lacks files, or has state of another rule, model, stage or number of ranks: DeepSpeed
        would fail later, or not at all. If one rank refuses a tag, or cannot read its file, all ranks raise: else the
        others would wait for it.
        """
        load, read = engine._load_checkpoint, engine._get_all_zero_checkpoints

        def load_checkpoint(load_dir: str, tag: str, *arguments: Any, **keywords: Any) -> Any:
            """Replaces `_load_checkpoint`: check the tag, and load it.

            The number of ranks, and each rank's file of state, are checked if optimizer states are loaded, and not
            from a universal checkpoint.
            """
            self.finish()
            self._end_lending()  # in case an interrupt has left state with DeepSpeed
            if not tag:  # DeepSpeed has read it in `latest`, unless the caller has given ""
                raise CheckpointError(
                    f"{os.path.join(load_dir, 'latest')} is empty, as whoever wrote it was killed; "
                    f"nothing was loaded. Load a tag by its name: whole ones are {_whole_tags(load_dir)}"
                )
            folder = self._loading_folder = os.path.join(load_dir, tag)
            self._on_all_ranks(lambda: _check_stage(folder, engine.zero_optimization_stage()))
            needed = [engine._get_ckpt_name(load_dir, tag)]
            with_state = keywords.get("load_optimizer_states", True) and not keywords.get("load_module_only", False)
            if with_state and not engine.load_universal_checkpoint():
                # The greatest of all ranks' counts: each node may have only the files of its own ranks.
                saved_ranks = max_over_ranks(_rank_count_by_files(folder), self.dp_process_group)
                ranks = engine.seq_dp_world_size
                if saved_ranks not in (0, ranks):  # 0: not known, as there are no files
                    # Files may be missing, or left by an earlier save: the model's file has the right number.
                    in_model = _rank_count_by_model(engine._get_ckpt_name(load_dir, tag))
                    saved_ranks = max_over_ranks(in_model, self.dp_process_group) or saved_ranks
                if saved_ranks not in (0, ranks):
                    raise _other_rank_count_error(folder, saved_ranks, ranks)
                needed.append(engine._get_zero_ckpt_name(load_dir, tag))
            # Other checkpoint engines may write other files, and a universal checkpoint has others.
            has_files = stream.can_stream(engine.checkpoint_engine) and not engine.load_universal_checkpoint()
            self._on_all_ranks(lambda: _check_whole(folder, (folder, *needed) if has_files else ()))
            for state_file in needed[1:]:  # this rank's, if its state is loaded
                self._on_all_ranks(functools.partial(self._check_state, state_file))
            with contextlib.ExitStack() as undo:
                # For a load of ZeRO-3's weights alone DeepSpeed calls this function without the tag, and so gets the
                # weights of the tag that `latest` names.
                module, name = import_module("deepspeed.runtime.engine"), "get_fp32_state_dict_from_zero_checkpoint"
                if hasattr(module, name):
                    shared.replace(undo, module, name, functools.partial(getattr(module, name), tag=tag))
                return load(load_dir, tag, *arguments, **keywords)

        engine._load_checkpoint = load_checkpoint
        engine._get_all_zero_checkpoints = lambda *given: self._on_all_ranks(lambda: read(*given))

    def _check_state(self, path: str) -> None:
        """Raise `CheckpointError` if a rank's file has state of another model or rule, which DeepSpeed would load."""
        names, numels = _state_in(path)
        own_names = {*self.shard.names[1:]}  # without the master's
        own_numels = [state.master.numel() for state in self.shard.without_memory()]
        if names and names != own_names:
            raise CheckpointError(
                f"{path} has state of another rule ({', '.join(sorted(names))}), and this optimizer's is "
                f"{rule_of(self.optimizer).name!r} ({', '.join(sorted(own_names))}); nothing was loaded. Use the "
                "optimizer that saved it, or load the weights alone: load_optimizer_states=False"
            )
        if numels and numels != own_numels:
            raise CheckpointError(
                f"{path} has {sum(numels)} elements in {len(numels)} flat tensors, and this engine "
                f"{sum(own_numels)} in {len(own_numels)}; nothing was loaded. It is of another model, of other "
                "parameters that train, or of another zero_optimization.sub_group_size: give those that saved it"
            )

    def _save_model_file(self, save: Callable[[], None], engine: Any, path: str) -> None:
        """Save the model's file to `path`, without a copy of all weights in memory. Collective.

        DeepSpeed's method `save` writes the file with holes for tensors, which are then filled from where they lie.
        In a save behind training the weights' holes stay if weights equal their rounded masters on all ranks: each
        rank then writes its rounded masters there, with its state, and the file keeps its partial name until that is
        done.
        """
        is_behind = self._saves_in_background and not engine.use_node_local_storage()
        may_leave_out = is_behind and self.behind is not None and self.behind.weights_are_rounded_masters
        left_out = self.unchanged_weights() if may_leave_out else ()
        if self._on_any_rank(not left_out):  # either all ranks leave weights out, or none does
            left_out = ()

        def write() -> None:
            """Write the file on rank 0, or with node-local storage on one rank of each node; others write none."""
            if torch.distributed.get_rank() == 0:
                set_aside(path, is_kept=is_behind)
            with _saving_to_partial(engine, "_get_ckpt_name", path):
                with stream.writing_holes(engine.checkpoint_engine) as saved_states:
                    save()
                places_by_file = [fill(partial_of(path), state, left_out) for state in saved_states]
            for places in places_by_file:  # of one file, or of none on ranks where `save` writes none
                if places is None:
                    log.warning("weights are saved to %s in a way that cannot be streamed", path)
                    discard_partial(path)
                    save()
                elif is_behind:
                    self._note_unnamed_model(path, places, are_left_out=bool(left_out))
                else:
                    name_file(path)
                    discard_partial(path)  # what is left of it: the folder

        try:
            self._on_all_ranks(write)
        except BaseException:
            if torch.distributed.get_rank() == 0:
                discard_partial(path)
            raise

    def _note_unnamed_model(self, path: str, places: Places, *, are_left_out: bool) -> None:
        """Note that a model's file keeps its partial name; and, if weights are left out, where their holes begin."""
        starts = [start_of(places, flat) for flat in self.flat_weights] if are_left_out else []
        self._unnamed_model = UnnamedModel(path, starts, _file_identity(partial_of(path)))

    def _save_state_file(self, save: Callable[[str, str], None], engine: Any, save_path: str, tag: str) -> None:
        """Save this rank's file of state: DeepSpeed's `save` leaves holes for state, which is then written into them.

        Where the file cannot have holes, or they are not found in it, `save` writes it with a copy of the state. The
        file gets its name when it is whole: with holes it already has its full size, and would be loaded as zeros.
        """
        if not stream.can_stream(engine.checkpoint_engine):
            save(save_path, tag)
            return
        path = engine._get_zero_ckpt_name(save_path, tag)
        partial = partial_of(path)
        try:
            with _saving_to_partial(engine, "_get_zero_ckpt_name", path):
                starts = self._save_without_state(save, engine, partial, save_path, tag)
                if starts is None:  # no holes were found
                    save(save_path, tag)  # over the file without state
                else:
                    visit = self.shard.engine.state.visit  # which needs no names: it visits all state tensors
                    stream.write_state({partial: starts}, self.shard, lambda take, _: visit(take))
                name_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written, and the tag is not whole: {error}") from error

    def _save_without_state(
        self, save: Callable[[str, str], None], engine: Any, path: str, save_path: str, tag: str
    ) -> stream.Starts | None:
        """Have DeepSpeed write its file with holes for state; return where the holes are, None if that is unknown.

        All other tensors are whole in the file.

        Args:
            save: DeepSpeed's method, which is given `save_path` and `tag`.
            engine: DeepSpeed's engine.
            path: Where `save` puts the file.
            save_path: The folder of all tags.
            tag: The tag's name.
        """
        self._saves_without_state = True
        try:
            with stream.writing_holes(engine.checkpoint_engine) as saved:
                save(save_path, tag)
        finally:
            self._saves_without_state = False
            placeholders, self._left_out_state = self._left_out_state, None
        starts = None
        if placeholders is not None:  # else DeepSpeed has not asked for the state that it was to save
            left_out = [tensor for state in placeholders for tensor in state.tensors.values()]
            places = fill(path, saved[0], left_out)  # `save` has written one file
            starts = None if places is None else stream.starts_of(places, placeholders)
        if starts is None:
            log.warning("state is saved to %s in a way that cannot be streamed, so it is copied first", path)
        return starts

    def _begin_save_behind(
        self, behind: SavesBehind, save: Callable[[str, str], None], engine: Any, save_path: str, tag: str
    ) -> None:
        """Pin state and begin to write it in the background; training may go on when this returns. Collective.

        Arguments as of `_save_without_state`. `behind` writes the state.
        """
        names_latest = bool(self._names_latest)
        folder = os.path.abspath(save_path)  # the program may change its directory meanwhile
        path = engine._get_zero_ckpt_name(folder, tag)
        model_path = engine._get_ckpt_name(folder, tag)
        given_by_rank: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(given_by_rank, (path, uuid.uuid4().hex, self._unnamed_model))
        rank_files = [given_path for given_path, _, _ in given_by_rank]
        _, id, unnamed_model = given_by_rank[0]  # all ranks use rank 0's id and its model's file
        model = self._own_part_of_model_file(unnamed_model, model_path)

        def begin() -> None:
            """Write this rank's file with holes for state, then pin the state.

            If its holes are not found, the file is written with a copy of the state, and nothing is pinned.
            """
            with _saving_to_partial(engine, "_get_zero_ckpt_name", path):
                starts = self._save_without_state(save, engine, partial_of(path), folder, tag)
                frame = None
                if self._checkpoint_layout == "in_place":
                    if starts is None:
                        raise CheckpointError(f'where state lies in {path} cannot be told: use the layout "stock"')
                    frame = stream.frame_of(partial_of(path), os.path.basename(path), starts, self.shard)
                if starts is None:
                    save(folder, tag)
            if model is not None and model.starts:
                if starts is None:  # masters are not pinned then, so the weights are written now
                    stream.write_weights(partial_of(model.path), model.starts, self.shard.weights)
                    model.starts = []
                # `behind` checks by these, afterwards, that the rounded masters are what the weights are now.
                model.digests = [stream.digest(weight) for weight in self.shard.weights]
            # A model's file that has its name already: DeepSpeed, which may have written it, makes no file durable.
            to_sync = [model_path] if os.path.exists(model_path) else []
            behind.begin(PendingTag(folder, tag, path, rank_files, starts, frame, model, to_sync, names_latest, id))

        self._on_all_ranks(begin)

    def _own_part_of_model_file(self, unnamed: UnnamedModel | None, path: str) -> SharedModel | None:
        """Return which part of the weights this rank is to write to a model's file; None if nothing is to be done.

        Rank 0 has written all else of the file. If ranks do not see the same file, it writes all weights, too. Then,
        or if it has written them before, all that is to be done is to name the file, by rank 0. Collective.

        Args:
            unnamed: What rank 0 says of its file; None if the file has its name.
            path: The file's path when it is whole.
        """
        rank = torch.distributed.get_rank()
        if unnamed is None:
            return None
        starts, flats = unnamed.starts, self.flat_weights
        if starts and self._on_any_rank(_file_identity(partial_of(path)) != unnamed.identity):
            self._on_all_ranks(lambda: stream.write_weights(partial_of(path), starts, flats) if rank == 0 else None)
            starts = []
        if not starts:  # all weights are written; rank 0 still has to name the file
            return SharedModel(path, []) if rank == 0 else None
        # This rank's part is a view of the flat tensor. It begins as far behind the tensor's start as in memory.
        own_starts = [
            None if start is None else start + own_part.data_ptr() - flat.data_ptr()
            for start, flat, own_part in zip(starts, flats, self.shard.weights, strict=True)
        ]
        return SharedModel(path, own_starts)

    def _add_steps(self, saved: dict[str, Any], states: list[FlatState]) -> dict[str, Any]:
        """Add step counts by name, which DeepSpeed lacks, to the dict `saved` that it saves, and return that.

        `states` is the lent state in the dict. It is noted if it stands for holes; see `_save_without_state`.
        """
        saved[STEPS] = self.shard.steps()
        if self._saves_without_state:
            self._left_out_state = states
        return saved

    # What DeepSpeed calls

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether a gradient of any rank has an element that is not finite. Collective.

        DeepSpeed gives `partition_gradients`, which makes no difference here.
        """
        return self._on_any_rank(not self._on_all_ranks(self.shard.is_finite))

    def independent_gradient_partition_epilogue(self) -> None:
        """Tell the engine that backward has ended: DeepSpeed calls this when it has reduced the last gradients."""
        super().independent_gradient_partition_epilogue()  # type: ignore[misc]
        self.offload.gradients.end_backward()

    def reset_cpu_buffers(self) -> None:
        """Close the shard's window of gradients: DeepSpeed calls this at the end of a step, made or skipped."""
        super().reset_cpu_buffers()  # type: ignore[misc]
        self.shard.close_window()

    # Phases

    def offload_states(
        self, include: Iterable[Any] | None = None, *arguments: Any, non_blocking: bool = False, **keywords: Any
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
            self.shard.forget_used_gradients()
            self.offload.park(keep_host=True, wait=not non_blocking)
        by_deepspeed = wanted - {kinds.optim_states, kinds.hp_params, kinds.lp_grads}
        if kinds.lp_params in by_deepspeed:
            self._release_weights()
        if by_deepspeed:
            super().offload_states(by_deepspeed, *arguments, non_blocking=non_blocking, **keywords)  # type: ignore[misc]

    def reload_states(self, non_blocking: bool = False) -> None:
        """Allocate memory again for what DeepSpeed has moved, and for the engine's state, which is read when used."""
        super().reload_states(non_blocking=non_blocking)  # type: ignore[misc]
        self._rebind_weights()
        self.offload.unpark()

    def check_is_loaded(self) -> None:
        """Raise `CheckpointError` if `offload_states` is in force: nothing can be saved then."""
        if not self.shard.weights:  # `_release_weights` has cleared the list
            raise CheckpointError("offload_states() has given memory back: call reload_states() before this save")

    def _release_weights(self) -> None:
        """Drop references to the flat tensors of weights: DeepSpeed is about to move them.

        Until `_rebind_weights` the empty `shard.weights` show that they are away.
        """
        self.shard.weights.clear()

    def _rebind_weights(self) -> None:
        """Note DeepSpeed's flat tensors of weights again, after it may have moved them."""
        raise NotImplementedError

    def pass_on_include(self, engine: Any) -> None:
        """Have a DeepSpeed engine's `offload_states` pass masters and moments on to ours.

        DeepSpeed itself leaves them out where its optimizer is offloaded, as this one counts.
        """
        engine._refine_include_states = lambda include: include

    def overlap_forward(self, *arguments: Any, **keywords: Any) -> None:
        """Raise `ConfigError`: DeepSpeed's config says whether steps go on into forward."""
        DEEPSPEED_FORWARD.refuse("overlap_forward", "called")

    def destroy(self) -> None:
        """Wait for a checkpoint that is being written, then free memory and files: the engine's, then DeepSpeed's.

        After the wait the handler of SIGTERM that was there before ours is restored, and is passed a signal for which
        nothing was saved.
        """
        if self.behind is not None:
            self.behind.close()
        if self.sigterm is not None:
            self.sigterm.restore()
        self.shard.close()
        super().destroy()  # type: ignore[misc]


@contextlib.contextmanager
def _saving_to_partial(engine: Any, method: str, path: str) -> Iterator[None]:
    """While this context lasts, have DeepSpeed save the file `path` under its partial name; delete it on an error.

    `method` is the engine's method that returns where to save that file: it is replaced on the engine.
    """
    setattr(engine, method, lambda *given: partial_of(path))
    try:
        yield
    except BaseException:
        discard_partial(path)
        raise
    finally:
        vars(engine).pop(method, None)


def _file_identity(path: str) -> tuple[int, ...]:
    """Return inode, size and time of change of a file, by which ranks compare files; () if it is not there."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _is_driven_by_accelerate() -> bool:
    """Return whether Accelerate drives DeepSpeed: it deletes older checkpoints as soon as a save returns.

    `AcceleratorState._shared_state` has the attributes of all its instances; it is empty until there is one.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)  # None if it is not imported
    # The type is a member of an enum, whose text has the name.
    return "deepspeed" in str(getattr(state, "_shared_state", {}).get("distributed_type", "")).lower()


def _rank_count_by_files(folder: str) -> int:
    """Return how many ranks have saved state in a tag's folder, by the names of its files; 0 if none has."""
    try:
        names = os.listdir(folder)
    except OSError:  # DeepSpeed says that it is not there
        return 0
    # With a prefix for the dtype, such as "bf16_"; older DeepSpeeds leave out the underscore before "optim".
    matches = [re.fullmatch(r"(?:.*_)?zero_pp_rank_(\d+)_mp_rank_\d+_?optim_states\.pt", name) for name in names]
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _rank_count_by_model(path: str) -> int:
    """Return how many ranks have saved a model, as its file says; 0 if the file cannot be read."""
    with contextlib.suppress(Exception):
        return int(torch.load(path, "meta", weights_only=False, mmap=True)["dp_world_size"])
    return 0


def _check_stage(folder: str, stage: int) -> None:
    """Raise `CheckpointError` if, of the engine (of ZeRO's `stage`) and a tag's folder, just one is of ZeRO-3."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    # For each model's file whether it has the number of a rank in its name, as with ZeRO-3; empty without files.
    are_of_stage_3 = {name.startswith("zero_pp_rank_") for name in names if name.endswith("_model_states.pt")}
    if are_of_stage_3 and (stage == 3) not in are_of_stage_3:
        raise CheckpointError(
            f"{folder} was saved by ZeRO-{'1 or 2' if stage == 3 else '3'}, and DeepSpeed cannot load it into "
            f"ZeRO-{stage}, not as a universal checkpoint either; nothing was loaded. Go on with the stage that "
            "saved it, or begin anew with its weights, which zero_to_fp32.py beside the tags writes"
        )


def _check_whole(folder: str, needed: Sequence[str]) -> None:
    """Raise `CheckpointError` if the save of a tag has not ended, or one of the needed paths is not there."""

    def is_there(path: str) -> bool:
        """Return whether a file or folder is there, by its name or by the one that older DeepSpeeds gave it."""
        return os.path.exists(path) or os.path.exists(path.replace("_optim_states.pt", "optim_states.pt"))

    is_begun = mark_of(folder) is Mark.BEGUN
    missing = next((path for path in needed if not is_there(path)), "")
    if not missing and not is_begun:
        return
    above, own = os.path.split(folder)
    another = f"another tag; whole ones beside it: {_whole_tags(above, but=own)}"
    if is_begun:
        raise CheckpointError(
            f"{folder} is not whole, as its save was interrupted or is under way; nothing was loaded. If it has been "
            f"saved without offload since, delete {BEGUN} in it, or else load {another}"
        )
    raise CheckpointError(
        f"{missing} is not there; nothing was loaded. Bring it back from a mirror (offload fetch) or a backup, "
        f"or load {another}"
    )


def _whole_tags(folder: str, but: str = "") -> str:
    """Return, as words for an error, which tags in a folder are marked as whole, without the tag `but`."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    whole = [name for name in names if name != but and mark_of(os.path.join(folder, name)) is Mark.WHOLE]
    return ", ".join(whole) or "none"


def _state_in(path: str) -> tuple[set[str], list[int]]:
    """Return of a rank's file the names of state tensors besides the master, and the sizes of its flat masters.

    The sizes, in elements, are of ZeRO-3 alone: [] with ZeRO-1 and 2. Both are empty where the file cannot be read.
    """
    with contextlib.suppress(Exception):  # DeepSpeed says what is wrong with a file; a stub refuses to be looked into
        part = torch.load(path, "meta", weights_only=False, mmap=True)[in_place.OPTIMIZERS[0]]
        saved = next(part[name] for name in in_place.OPTIMIZERS if name in part)
        states = saved["state"].values() if isinstance(saved, dict) else saved  # a list if it is "elastic"
        # Not those of ZeRO-1 and 2, which are padded. There the model's file shows whether the model is another one.
        masters = part.get(in_place.MASTERS[0], ())
        return {name for state in states for name in state} - {"step"}, [master.numel() for master in masters]
    return set(), []


def _other_rank_count_error(folder: str, saved_ranks: int, ranks: int) -> CheckpointError:
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
