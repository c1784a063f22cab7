"""Checkpoints of a session: writing them in the background, waiting for them, keeping, releasing and loading them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from offload import combinations, waits
from offload.checkpoint.commit import note_failure
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.reader import BUFFERS, Checkpoint, StateSource
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.restore import Restorer
from offload.checkpoint.saves import save_error
from offload.checkpoint.stores import commit_to_replace
from offload.checkpoint.takeover import manifest_in_place
from offload.errors import CheckpointError, ConfigError, InternalError, OffloadError, SessionBrokenError
from offload.layout import Layout
from offload.plan.budget import CHECKPOINT_BUFFERS
from offload.schedule.loop import pump
from offload.schedule.operations import AbortSave, BeginSave, ReleaseSave, Sweep, TakeOver
from offload.schedule.saving import no_room
from offload.schedule.staging import Phase
from offload.session.parts import SessionParts
from offload.session.thread import EngineThread
from offload.session.visits import SweepRequests, nothing
from offload.tiers.place import Folder


class Checkpoints:
    """The checkpoints of one session."""

    def __init__(self, parts: SessionParts, thread: EngineThread, sweep_requests: SweepRequests) -> None:
        self._parts = parts
        self._thread = thread
        self._sweep_requests = sweep_requests

    # Writing and keeping them

    def save(self, request: SaveRequest) -> None:
        """Start a checkpoint of the state as it is now; it is written in the background.

        State on a path stays where it is, and its store slots are reserved; state in memory is written, before its
        next update at the latest. Masters that are (fp32) weights are written before this returns, as the caller may
        change them. Without paths, or with `copy`, everything is written to the folder itself.

        Args:
            request: The folder, and what is saved beside the state.

        Raises:
            ConfigError: Two parameters would have one name.
            CheckpointError: The folder cannot be used, there is no room for a checkpoint, or a tier has failed, whose
                error is the cause; training may go on.
            SessionBrokenError: The session cannot be used, or broke while state was made ready to be saved.
        """
        parts, folder = self._parts, open_folder(request.path)
        names = [request.names.get(parameter.name, parameter.name) for parameter in parts.plan.layout.parameters]
        if len({*names}) < len(names):
            raise ConfigError("names", dict(request.names), "use another name for each parameter")
        request = replace(request, path=folder.path, copy=request.copy or not parts.config.paths)
        with self._thread.turn():
            if not request.copy and not parts.config.checkpoints:
                combinations.NONE_KEPT.refuse("checkpoints_kept", 0)
            try:
                self._save(folder, request)
            except OffloadError:
                note_failure(folder, request)  # so that other ranks do not wait for this one
                raise

    def _manifest(self, request: SaveRequest) -> Manifest:
        """Return the manifest of a checkpoint of the state as it is now; records of tiles are added later."""
        layout, tables = self._parts.plan.layout, self._parts.tables
        layout = layout.renamed(request.names) if request.names else layout
        # State that is rounded stochastically goes on alike only with the same seed and numbers of parameters.
        rounds = layout.state.format.rounds
        is_replica = request.replica  # another rank saves the state, so this manifest names none
        return Manifest(
            id=request.id,
            rank=request.rank,
            ranks=request.ranks,
            step=self._thread.sweeps.step_number,
            layout=Layout((), (), layout.state) if is_replica else layout,
            steps=() if is_replica else tuple(tables.steps.tolist()),
            checksums=self._parts.config.checksum,
            metadata={**request.metadata},
            seed=tables.seed if rounds else None,
            numbers=tuple(tables.numbers.tolist()) if rounds and not is_replica else (),
            host=socket.gethostname(),
            run=self._parts.saves.run,
        )

    def _save(self, folder: Folder, request: SaveRequest) -> None:
        """Begin a checkpoint, in the caller's turn.

        First wait for the checkpoint before it, release what can be released, and visit subgroups whose state is not
        ready to be saved. Then hand the save over to the machine. Start over if a signal handler has begun another
        checkpoint, or set weights, in between.
        """
        parts = self._parts
        parts.saves.wait_for_pending()
        self._thread.check_usable()  # it may have broken during the wait
        # Release first what need not be kept: this save may have no room otherwise.
        if parts.saves.has_awaiting_mirror:
            self._release_now(parts.saves.release_deleted)
        if parts.saves.has_interrupted:
            self._release_now(parts.saves.release_interrupted)
        parts.saves.begin(request)
        layout, index = parts.plan.layout, parts.machine.index
        # A checkpoint cannot refer to tiles in another session's store: their subgroups are written anew.
        foreign = [s.index for s in layout.subgroups if any(index.is_foreign(tile) for tile, _, _ in s.tiles)]
        # Also with `replica`, where another rank saves this rank's state: both go on with masters as they are saved.
        due_subgroups = {*foreign, *self._due_before_save(request.replica)}
        if subgroups := sorted(due_subgroups | self._find_rewritten(folder, request, due_subgroups)):
            # A visit that changes state gives it a new version. This one does `nothing` else but make state whole:
            # masters are taken from weights, which stay as they are (`sets_weights`).
            masters = range(len(layout.parameters))
            visitor = self._sweep_requests.make_visitor(nothing, changes=True, masters=masters, sets_weights=False)
            self._request(folder.path, partial(self._thread.sweeps.begin, subgroups, visitor, changes=True))
        if request.rank == 0:
            parts.saves.check_replaced(folder, commit_to_replace(folder))
        folder.prepare()
        is_overtaken = False

        def begin() -> None:
            """Begin the save, unless a signal handler's request has begun another one, or has set weights."""
            nonlocal is_overtaken
            is_overtaken = parts.saves.pending is not None or bool(self._due_before_save(request.replica))
            if not is_overtaken:
                self._begin_save(folder, request)

        self._request(folder.path, begin, needs_memory=False)
        if is_overtaken:
            self._save(folder, request)

    def _begin_save(self, folder: Folder, request: SaveRequest) -> None:
        """Hand a save over to the machine, and wait until masters that are weights are written; engine thread."""
        parts, machine, saver = self._parts, self._parts.machine, self._parts.machine.saver
        # The last sweep's state may still be on its way back from the GPU.
        pump(machine, parts.executor, lambda m: m.broken is not None or Phase.BUSY not in m.phases)
        if machine.broken is not None:
            raise machine.broken
        manifest = self._manifest(request)
        # State at home on a GPU, and fp32 weights, are copied to buffers and written from there.
        needs_buffers = parts.plan.bounce_bytes > 0 or any(s.weight_tiles for s in manifest.layout.subgroups)
        try:
            pending = parts.saves.open(folder, request, manifest, needs_buffers=needs_buffers)
        except OffloadError:
            raise
        except Exception as cause:  # nothing has begun, so it does not break the session
            raise CheckpointError(f"no checkpoint can be opened in {folder.path}: {cause!r}") from cause
        machine.handle(BeginSave(pending.save))
        save = saver.under_way  # None if it could not begin: `finished_save` says why
        # Steps write to other slots than those that the checkpoint keeps, so there must be room for both. A copy goes
        # to a sink, and keeps no slot.
        if save is not None and save.request.sink is None and not parts.allocate():
            parts.executor.submit(machine.take_operations())
            machine.handle(AbortSave(no_room()))
        # The caller may change its weights once `save` has returned, so those that are masters are written before.
        pump(machine, parts.executor, lambda m: not saver.has_unwritten_weights or saver.finished_save is not None)
        if saver.finished_save is not None:
            _, error = saver.finished_save
            if error is not None:
                self._thread.note_save_end()
                raise error

    def _due_before_save(self, is_replica: bool) -> list[int]:
        """Return the subgroups that a save has to visit first.

        These are subgroups whose masters are still to be taken from their weights (`is_due`), or whose state has
        never been made (fresh). And those of fp32 weights, which are masters, that the user has written to: a
        checkpoint may already hold other bytes under the number of their version, and a visit gives them a new one.

        Args:
            is_replica: Whether another rank saves this rank's state: state that was never changed need not be made.
        """
        machine, tables = self._parts.machine, self._parts.tables
        numbers = range(len(self._parts.plan.layout.subgroups))
        if is_replica:
            return [number for number in numbers if tables.is_due(number)]
        return [n for n in numbers if tables.is_due(n) or machine.is_fresh(n) or tables.is_rewritten(n)]

    def _find_rewritten(self, folder: Folder, request: SaveRequest, known_to_be: Collection[int]) -> set[int]:
        """Return further subgroups whose fp32 weights were written to since an earlier checkpoint has saved them.

        The user may write through `.data` or NumPy, which torch does not count, so `_due_before_save` misses that.
        Only weights that the checkpoint would share with an earlier one, as no step has updated them since, are read
        and compared by their checksums; mostly there are none.

        Args:
            folder: Of the new checkpoint.
            request: What is saved.
            known_to_be: Subgroups that are visited in any case, and not compared.
        """
        machine, rewritten = self._parts.machine, set[int]()
        if request.replica or not self._parts.config.checksum:  # then there is nothing to compare
            return rewritten
        numbers = range(len(self._parts.plan.layout.subgroups))
        # (tile, record) of the weight tiles whose present version checkpoints hold.
        held_tiles = [*chain.from_iterable(machine.held_weights(n).items() for n in numbers if n not in known_to_be)]

        def compare() -> None:
            """Read and compare the weights, on the engine thread."""
            rewritten.update(self._parts.saves.find_rewritten(held_tiles))

        if held_tiles:
            self._request(folder.path, compare, needs_memory=False)
        return rewritten

    def _request(self, folder: str, begin: Callable[[], Sweep | None], *, needs_memory: bool = True) -> None:
        """Make a request that is part of a save; if it fails and the session goes on, raise that as the save's error.

        Raises:
            CheckpointError: The save has failed; training may go on.
            SessionBrokenError: The session has broken.
        """
        try:
            self._thread.request(begin, needs_memory=needs_memory)
        except (ConfigError, InternalError):
            raise
        except OffloadError as error:
            self._thread.check_usable()  # raises if the session has broken
            of_save = save_error(folder, error)
            raise of_save from of_save.__cause__  # `error`; or its own cause, if it is a save's error itself

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that was started last has been committed, for at most `timeout_s`, if given.

        Raises:
            CheckpointError: It failed; if a tier has failed, its error is the cause. Training may go on.
            TimeoutError: It has not been committed by then.
            SessionBrokenError: The session belongs to the process that forked this one.
        """
        self._thread.check_process()
        saves = self._parts.saves
        pending = saves.pending or saves.last
        if pending is None:
            return
        if not pending.wait(timeout_s):
            raise TimeoutError(f"the checkpoint in {pending.folder.path} is not written after {timeout_s} s")
        if pending.error is not None:
            raise pending.error

    def has_begun(self, id: str) -> bool:
        """Return whether the newest save, under way or ended, has this id; for a caller that was interrupted."""
        saves = self._parts.saves
        return any(save is not None and save.request.id == id for save in (saves.pending, saves.last))

    def mirror_folder(self, folder: str, rank: int = 0, ranks: int = 1, *, is_new: bool = True) -> None:
        """Queue a background copy of a framework's checkpoint folder to `OffloadConfig.mirror`, if there is a mirror.

        A folder of up to 256 files (`whole.MOST_OPEN`; fewer where a process may open few) may be deleted when this
        returns, as its files are open then. A larger one has to stay until it is copied. Once the copy is complete it
        is marked so; then copies of sibling folders that have been deleted here are deleted from the mirror, too. If
        the copy cannot be begun, that is logged.

        Args:
            folder: A directory with a complete marker, which nobody writes to any more. All ranks name the same.
            rank: This rank, of those that have saved the checkpoint in it.
            ranks: How many ranks have.
            is_new: True just after saving. False: a session that was killed may have copied some of it already.
        """
        begin = partial(self._parts.saves.mirror_folder, folder, rank, ranks, is_new=is_new)
        waits.apart(begin, "offload-mirror-folder", lambda: f"{folder} to be opened")

    def wait_mirror(self, timeout_s: float | None = None) -> None:
        """Wait until `OffloadConfig.mirror` has the newest committed checkpoint, for at most `timeout_s`, if given.

        Raises:
            CheckpointError: It could not be mirrored. The checkpoint itself is whole, and training may go on.
            TimeoutError: It has not been mirrored by then.
            SessionBrokenError: The session belongs to the process that forked this one.
        """
        self._thread.check_process()
        self._parts.saves.wait_for_mirror(timeout_s)

    @property
    def kept(self) -> tuple[str, ...]:
        """Folders of the checkpoints whose state stays on the paths, oldest first; without those saved with `copy`.

        If there are `OffloadConfig.checkpoints_kept` of them, the next save without `copy` releases the oldest.
        """
        return tuple(checkpoint.folder for checkpoint in self._parts.saves.kept)

    def visit(
        self,
        path: str | os.PathLike[str],
        take: Callable[[int, int, Mapping[str, torch.Tensor]], None],
        names: Sequence[str] | None = None,
    ) -> None:
        """Hand out the state of a checkpoint that this session has saved, run by run, while the session goes on.

        Args:
            path: The folder that it was saved to.
            take: See `State.visit`; called on this thread.
            names: Which state tensors, all if left out; "weight" is the master, rounded to the weight's type.

        Raises:
            CheckpointError: There is no checkpoint in the folder, or it cannot be read.
            Exception: What `take` raised.
        """
        with self._open(path, buffers=CHECKPOINT_BUFFERS) as checkpoint:
            checkpoint.read_pieces(self._parts.plan.layout.parameters, take, names)

    def open(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a checkpoint of any session; its stores are looked for on this session's paths, too.

        A save of this session that is under way ends first: it may be the one to open, or replace it. Stores of other
        ranks may lie on other hosts: a store has to be on this host only when it is read.

        Args:
            path: The checkpoint's folder.

        Raises:
            CheckpointError: There is none, it is damaged or of a newer format, or one of its stores is missing.
        """
        self._thread.check_process()
        self._parts.saves.wait_for_pending()
        return self._open(path)

    def _open(self, path: str | os.PathLike[str], *, buffers: int = BUFFERS) -> Checkpoint:
        """Do as `open`, with at most so many tiles in memory at once, beside a save that is under way."""
        config = self._parts.config
        places = [place.path for place in config.path_configs]
        return Checkpoint(path, verify=config.checksum, paths=places, whole=False, buffers=buffers)

    def release(self, path: str | os.PathLike[str], *, after_mirror: bool = False) -> None:
        """Release a checkpoint that this session keeps: it can no longer be loaded, and its store slots are free.

        If a kept checkpoint's folder is missing, it may have been deleted or moved, so saves never release it; call
        this if it was deleted.

        Args:
            path: The folder that it was saved to.
            after_mirror: Release a checkpoint that is being mirrored later, at a save after its copy is complete.

        Raises:
            CheckpointError: No checkpoint in that folder is kept, or somebody is reading it.
        """
        folder = open_folder(path).path
        self._release(lambda: self._parts.saves.release(folder, after_mirror=after_mirror))

    def release_deleted(self) -> None:
        """Free the slots of kept checkpoints that somebody has released with `offload.release_before_deletion`.

        A checkpoint whose folder is merely not there is kept: it may have been moved.
        """
        self._release(self._parts.saves.release_deleted)

    @contextlib.contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Keep all checkpoints within this block; after it release the older ones that are too many.

        If an exception ends the block, checkpoints made in it are released first, when the next save needs room.
        """
        saves = self._parts.saves
        before = saves.last
        with saves.keeping_all():
            yield
        self._release(partial(saves.release_older, before))

    def _release(self, release: Callable[[], Sequence[int]]) -> None:
        """Wait for the caller's turn and for a save under way, then do as `_release_now`."""
        with self._thread.turn():
            self._parts.saves.wait_for_pending()
            self._release_now(release)

    def _release_now(self, release: Callable[[], Sequence[int]]) -> None:
        """Release checkpoints, and have the machine free their store slots; in the caller's turn.

        Args:
            release: Releases them, and returns the numbers of their saves.
        """

        def begin() -> None:
            """Do both on the engine thread, where no interrupt comes between them."""
            for number in release():
                self._parts.machine.handle(ReleaseSave(number))

        self._thread.request(begin, needs_memory=False)

    # Going on from one

    def load(
        self,
        checkpoint: StateSource,
        *,
        names: Mapping[str, str] | None = None,
        rank: int = 0,
        ranks: int = 1,
        anew: Collection[str] = (),
    ) -> None:
        """Replace all state, step counts and weights by what a checkpoint has for these parameters.

        If subgroups, tiles and ranks are the same, streamed state is not copied. Its store slots become
        this session's if the session that wrote them has ended and they lie on one of this session's paths; else they
        are only read.

        Args:
            checkpoint: An open one, or a file of another format; may be closed afterwards.
            names: A parameter's name in the checkpoint by its name here, where they differ.
            rank: This rank.
            ranks: Number of ranks.
            anew: Parameters that keep their weights and begin with new state if the checkpoint has none of them.

        Raises:
            CheckpointError: It lacks another parameter, or one has another size; nothing has changed then. Or part
                of it is damaged, which is found out while it is read: the session is broken then.
        """
        self._thread.check_process()
        parts, sweeps = self._parts, self._thread.sweeps
        with self._thread.turn():
            layout = parts.plan.layout
            restorer = Restorer(
                checkpoint, layout.parameters, names or {}, parts.views, parts.tables, parts.lanes, anew
            )
            parts.saves.wait_for_pending()
            self._thread.check_usable()
            take_over = None  # unless tiles of the checkpoint can be used where they lie
            if isinstance(checkpoint, Checkpoint):
                manifest = self._require_stores(checkpoint, layout, restorer, rank, ranks)
                if manifest is not None:
                    take_over = partial(self._take_over, checkpoint, manifest, restorer, rank, ranks)

            def applied() -> None:
                """Set the step counts, and drop the buffers through which state was read."""
                restorer.restore_step_counts()
                sweeps.step_number = checkpoint.step
                checkpoint.use_read_buffer(0, 0)  # zeros: through memory of its own again
                self._thread.drop_checkpoint_buffers()

            begin = partial(self._begin_load, checkpoint, layout, restorer, take_over)
            try:
                self._thread.request(begin, applied=applied)
            except SessionBrokenError:
                raise
            except OffloadError as error:
                if error is self._thread.broken:  # else it came before anything was replaced
                    raise CheckpointError(
                        f"{error}. The state was partly replaced, so the session is broken: load another checkpoint "
                        "into a new optimizer"
                    ) from error
                raise
            if isinstance(checkpoint, Checkpoint) and take_over is None:
                # On the engine thread, where no interrupt comes between a lock and taking note of it. A takeover has
                # noted the checkpoint itself.
                self._thread.request(partial(parts.saves.keep_loaded, checkpoint, rank, ranks))

    def _require_stores(
        self, checkpoint: Checkpoint, layout: Layout, restorer: Restorer, rank: int, ranks: int
    ) -> Manifest | None:
        """Open the stores that a load reads: of one rank if its tiles can be used where they lie, else of all needed.

        Returns:
            The manifest of that one rank; None if tiles have to be copied.

        Raises:
            CheckpointError: A store is missing.
        """
        manifest = manifest_in_place(checkpoint, layout, restorer.saved_names, rank, ranks)
        # The parameters that are read, under their names in the checkpoint:
        pairs = enumerate(zip(layout.parameters, restorer.saved_names, strict=True))
        restored = (replace(parameter, name=name) for n, (parameter, name) in pairs if n not in restorer.anew)
        needed_ranks = [manifest.rank] if manifest is not None else sorted(checkpoint.ranks_with(restored))
        for saving_rank in needed_ranks:
            checkpoint.require(saving_rank)
        return manifest

    def _begin_load(
        self, checkpoint: StateSource, layout: Layout, restorer: Restorer, take_over: Callable[[], None] | None
    ) -> Sweep:
        """Take over tiles that can stay in place, and begin the sweep that copies all other state.

        On the engine thread. With `take_over`, tiles of streamed subgroups stay in place, and the sweep has resident
        subgroups alone.
        """
        parts, sweeps = self._parts, self._thread.sweeps
        self._thread.settle()
        self._thread.note_save_end()  # before buffers are made, as the end of a save drops them
        copied = [
            subgroup.index
            for subgroup in layout.subgroups
            if not parts.machine.is_fresh(subgroup.index)  # a fresh one has no state that has to be replaced
            or any(segment.parameter not in restorer.anew for segment in subgroup.segments)
        ]
        buffers = parts.memory.ensure_checkpoint_buffers(parts.plan)  # which may fail: nothing has changed yet
        # Versions go on from the checkpoint's: no two versions of a tile have the same number.
        sweeps.version = max(sweeps.version, checkpoint.last_version)
        if take_over is not None:
            copied = [number for number in copied if parts.plan.is_resident(number)]
            take_over()
        checkpoint.use_read_buffer(*buffers)  # last: `take_over` reads through the staging slots
        return sweeps.begin(copied, restorer.restore, changes=True, overwrites=True)

    def _take_over(
        self, checkpoint: Checkpoint, manifest: Manifest, restorer: Restorer, rank: int, ranks: int
    ) -> None:
        """Use a checkpoint's tiles of streamed subgroups where they lie, and set weights from the masters in them.

        On the engine thread. An error breaks the session, as part of the state has been replaced.
        """
        parts = self._parts
        machine, layout = parts.machine, parts.plan.layout
        takeover = parts.saves.take_over(checkpoint, manifest, machine.index, parts, rank, ranks)
        # Other checkpoints in these stores may hold tiles of later steps, with versions that must not be used again.
        versions = (record.step for records in takeover.pinned_records.values() for record in records.values())
        self._thread.sweeps.version = max(self._thread.sweeps.version, *versions, 0)  # 0: there may be none
        streamed = [subgroup for subgroup in layout.subgroups if not parts.plan.is_resident(subgroup.index)]
        tiles = [tile for subgroup in streamed for tile, _, _ in subgroup.tiles]
        records = {tile: takeover.records[tile] for tile in tiles}
        machine.handle(TakeOver(takeover.limit_bytes, takeover.pinned_records, records))
        # No slot is in use, and nothing is started that reads into one before this request has ended.
        checkpoint.use_read_buffer(*parts.memory.staging)
        try:
            for subgroup in streamed:
                restorer.derive_weights(subgroup)
        except OffloadError as error:
            self._thread.say_broken(error)
            raise
