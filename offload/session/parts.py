"""What a session is made of: how its parts are put together, how they grow, and the order in which they end.

Its callers' requests are not known here, nor is the thread that answers them (offload/session/thread.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial

from offload import combinations, waits
from offload._native import CompletionQueue
from offload.checkpoint.saves import Saves, check_mirror
from offload.checkpoint.stores import delete_free, leftover_bytes
from offload.config import OffloadConfig
from offload.device.host import HostMemory
from offload.device.lanes import GpuLanes
from offload.device.none import Lanes, NoDevice
from offload.dtypes import DtypeCode
from offload.engine.executor import LiveExecutor
from offload.engine.tables import Tables
from offload.engine.views import StateViews
from offload.errors import ConfigError, InfeasiblePlanError, OffloadError
from offload.formats import StateFormat
from offload.gradients.gpu import GpuGradients
from offload.gradients.paths import Filler, PathGradients
from offload.gradients.store import GradientSlots, GradientStore, HostGradients
from offload.kernels import CpuUpdateKernel
from offload.layout import MAX_TILE_BYTES, Layout, Parameter, extend_layout, keep_exact, numels_by_format
from offload.limits import Limits
from offload.measure import probe_nodes, quick_probe, session_rates, tune_depth
from offload.measure.probe import with_whole_parameters
from offload.memory.arenas import available_bytes
from offload.memory.nodes import check_free, check_nodes, cpus_near
from offload.memory.touching import cpu_affinity
from offload.plan import Budgets, NodeRates, Plan, Rates, choose_plan, choose_subgroup_numel, make_plan
from offload.plan.budget import LEAST_BUFFERS, refuse_without_checkpoints
from offload.plan.planner import extend_plan, fastest_nodes_first
from offload.protocols import Device, Mark, Tier
from offload.rules import UpdateRule
from offload.schedule.index import TileIndex
from offload.schedule.machine import Machine, MachineListener
from offload.schedule.operations import Allocated, Extend, MakeSlots
from offload.session.setup import (
    LEAST_TILE_BYTES,
    default_threads,
    first_budgets,
    less_memory_advice,
    open_path,
    plan_to_fit,
)
from offload.tiers import check_places, parse_place
from offload.tiers.filesystem import MEMORY_FILE_SYSTEMS, UNLIMITED_BYTES

log = logging.getLogger("offload")

TILES_PER_PATH = 4
"""How many tiles of a subgroup each path gets at least, as far as tiles stay large enough."""


class SessionParts:
    """The parts of one session.

    Made in two steps, so that their maker can end them whatever is raised in between: new ones hold nothing, and
    `open` makes the session. From then on `executor`, `machine`, `views`, `saves` and `plan` belong to the engine
    thread; other threads may read `plan`. Arguments are those of `Engine`; `rank_count` is the count in its `among`.
    """

    executor: LiveExecutor
    machine: Machine
    views: StateViews
    saves: Saves
    gradients: GradientStore
    plan: Plan
    rates: Rates

    def __init__(
        self,
        config: OffloadConfig,
        gradient_slots: bool,
        device: Device,
        rule: UpdateRule,
        rank_count: int | None,
        limits: Limits | None,
        passing_bytes: int,
    ) -> None:
        self.config = config
        self.limits = limits = limits or Limits()
        self._empty = Layout((), (), config.state_of(rule))  # to which the session's parameters are added
        self.is_whole = False  # whether `open` has made all parts
        self._is_nameless_logged = self._is_missing_room_logged = False
        self._is_allocating = False  # whether a call that allocates room on the paths has not returned yet
        self.tables = Tables(config.seed)
        self.tiers: list[Tier] = []
        self.others: dict[int, Tier] = {}
        """Stores that are no path of the plan; see `LiveExecutor`."""
        self.queue = CompletionQueue()
        check_nodes("host_memory", config.node_bytes)

        self.lanes = Lanes(device)
        self._make_store: Callable[..., GradientStore] = HostGradients
        has_gpu = not isinstance(device, NoDevice)
        self.config = config = _config_for(config, rule, has_gpu=has_gpu)
        if has_gpu:
            self.lanes = lanes = GpuLanes(
                device,
                self.queue,
                self.tables,
                placement=config.placement,
                borrows=config.borrows,
                named_nodes=bool(config.node_bytes),
            )
            self._make_store = partial(GpuGradients, lanes=lanes, limits=limits)
            gradient_slots = True  # gradients on a GPU reach the CPU's updates through slots

        self.memory = HostMemory(self.lanes)
        self.closing: list[Tier] = []
        """Tiers that are being closed."""
        self.ends = contextlib.ExitStack()  # frees all parts, the last made first, whatever the others raise
        self._gradient_slots = GradientSlots(
            dtype=DtypeCode.FLOAT32 if config.gradient_dtype == "float32" else None,
            # With `gradient_memory` they pass through buffers.
            exist=gradient_slots and config.gradient_memory is None,
            needs_buffers=not config.keep_grads,  # with `keep_grads` torch adds up the passes in `.grad`
            passing_bytes=passing_bytes,
        )

        near_cpus = cpus_near(config.node_bytes)
        most_threads = default_threads(self.lanes, rank_count)
        # By default no more threads than there are CPUs near the memory nodes that the config names, if it does.
        self._threads = config.threads or min(most_threads, len(near_cpus) or most_threads)
        self._update_cpus = near_cpus if self._threads <= len(near_cpus) else frozenset[int]()
        """CPUs that updates run on; empty for all, also if more threads are wanted than CPUs are near."""
        self._store = uuid.uuid4()

    def _make_gradients(self, filler: Filler) -> GradientStore:
        """Return the store of gradients: on the paths, on a GPU or in host memory."""
        parts = self._gradient_slots, self.tables, self.kernel, self.memory
        if self.config.gradient_memory is not None:
            return PathGradients(*parts, lanes=self.lanes, filler=filler)
        return self._make_store(*parts)

    # Putting them together

    def open(
        self, parameters: tuple[Parameter, ...], *, listener: MachineListener, filler: Filler, caller_mark: Mark
    ) -> None:
        """Make the session's plan, memory, lanes and machine; after an error the caller closes `ends`.

        Args:
            parameters: The first parameters.
            listener: Is told what breaks the machine.
            filler: Gives buffers to gradients that pass through buffers.
            caller_mark: A mark after the work that the caller has put on the device so far.
        """
        config = self.config
        paths = [path.path for path in config.path_configs]
        check_places(paths)
        check_mirror(config)
        parameters = self._with_exact_marked(parameters)
        known_rates = self._known_rates(paths, numels_by_format(parameters, self._empty.state.format))
        self._node_rates = self._known_or_measured_node_rates(known_rates)
        if known_rates is not None:
            known_rates = dataclasses.replace(known_rates, nodes=self._node_rates)
        budgets = self._lay_out_and_plan(parameters, known_rates)
        # `ends` closes in reverse order. Made before the lanes, so that `Saves.close` comes after they are closed: it
        # releases the locks of stores that they use.
        saves_end = self.ends.enter_context(contextlib.ExitStack())
        self._open_lanes(filler)
        self._tune_and_measure(known_rates, budgets, caller_mark)
        self.plan = self._allocate_on_device(self.plan, self._empty)
        self.lanes.use_plan(self.plan)
        self.gradients.use_plan(self.plan, self._empty)
        self.views = StateViews(self.plan, self.tables, self.kernel, self.memory, self.lanes)
        self.machine = Machine(self.plan, self._make_index(), listener)
        stores = [(path, self._store) for path in paths]
        settle_s = self.limits.settle_s
        self.saves = Saves(
            config, self.queue, stores, self.tiers, self.others, self.memory, self.views, settle_s=settle_s
        )
        saves_end.callback(self.saves.close)
        self.executor = LiveExecutor(
            self.tiers,
            self.kernel,
            self.queue,
            self.memory,
            self.saves,
            verify=config.checksum,
            stall_s=config.stall_timeout_s,
            lanes=self.lanes,
            others=self.others,
        )
        self.ends.callback(self.executor.close)
        self.executor.use_plan(self.plan)
        self.ends.callback(self._tell_tiers_kept_slots)  # last, so that it is called first, before tiers are closed
        self.is_whole = True

    def _make_index(self) -> TileIndex:
        """Return the index of tiles for the plan: each path offers its room, and gets its share of the tiles."""
        paths, shares = self.plan.budgets.paths, self.plan.path_shares(self.rates)
        limits = [(path.available_bytes, share) for path, share in zip(paths, shares, strict=True)]
        return TileIndex(limits, self.plan.slot_counts, self.plan.checkpoint_bytes)

    def _with_exact_marked(self, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        """Return parameters, with `exact` set for those whose state is stored exactly even in a compact format.

        Warn once if the setting `exact_names` can match none, as parameters were given without names.
        """
        if not self._empty.state.format.shares_scales:  # then all state is stored alike
            return parameters
        # Names that were made up for parameters without one.
        is_nameless = any(parameter.name.startswith("param_groups[") for parameter in parameters)
        if is_nameless and self.config.exact_names and not self._is_nameless_logged:
            self._is_nameless_logged = True
            log.warning(
                "parameters have no names, so embeddings cannot be told from others and are stored in %s too; "
                "make the optimizer from named_parameters()",
                self._empty.state.format.name,
            )
        return keep_exact(parameters, self.config.exact_names)

    def _known_rates(self, paths: list[str], numels: Mapping[StateFormat, int]) -> Rates | None:
        """Return the rates that were measured for a session like this one, if they have all its lanes."""
        known_rates = session_rates(str(self.config.rates), paths, self._threads, numels)
        return self.lanes.known_rates(known_rates) if known_rates is not None else None

    def _known_or_measured_node_rates(self, known_rates: Rates | None) -> tuple[NodeRates, ...]:
        """Return the rates of the memory nodes that `host_memory` names: measured now unless known or only one."""
        node_bytes = self.config.node_bytes
        known = known_rates.nodes if known_rates is not None else ()
        if len(node_bytes) < 2 or {rates.node for rates in known} >= set(node_bytes):
            return known
        make_kernel = partial(CpuUpdateKernel, self.queue, self._threads)
        with cpu_affinity(self._update_cpus), contextlib.closing(make_kernel()) as kernel:
            most_bytes = max(node_bytes.values())
            measured = probe_nodes(kernel, self.queue, sorted(node_bytes), most_bytes, self.lanes)
        log.info("memory nodes reach, in bytes a second: %s", ", ".join(map(str, measured)))
        return measured

    def _lay_out_and_plan(self, parameters: tuple[Parameter, ...], known_rates: Rates | None) -> Budgets:
        """Cut the state into subgroups and tiles and plan where they live; return the budgets of the plan."""
        config = self.config
        paths = [path.path for path in config.path_configs]
        with contextlib.suppress(ConfigError):  # a path that cannot be read: opening a store there raises why
            delete_free(paths)  # stores of ended sessions, before the plan counts free space
        layout = self._lay_out(parameters)
        gradient_bytes = self._gradient_slots.total_bytes(parameters)
        budgets = first_budgets(config, layout, self.lanes, gradient_bytes)
        # A session that resumes from a checkpoint goes on in the stores of the ended one: they count as room, too.
        # Of a path with `max_bytes` they count up to what its offer leaves of these bytes.
        most_bytes = {
            path.path: (UNLIMITED_BYTES if path.max_bytes is None else path.max_bytes) - offer.available_bytes
            for path, offer in zip(config.path_configs, budgets.paths, strict=True)
        }
        self._leftover_bytes = leftover_bytes({path: most for path, most in most_bytes.items() if most})
        leftover = max(self._leftover_bytes.values(), default=0)  # which checkpoint will be loaded is not known yet
        budgets = dataclasses.replace(budgets, leftover_bytes=leftover)

        def plan_within(budgets: Budgets) -> Plan:
            """Return a plan within budgets: the fastest if rates are known; else `_tune_and_measure` plans again."""
            if known_rates is None:
                node_rates_only = Rates(1.0, nodes=self._node_rates)  # 1.0: the CPU's rate, which is not used here
                plan = make_plan(layout, fastest_nodes_first(budgets, node_rates_only))
            else:
                plan = choose_plan(layout, budgets, known_rates, config.placement)
            return plan.with_buffer_bytes(self.lanes.bounces)

        free_bytes = available_bytes()
        self.plan = plan_to_fit(config, budgets, plan_within, free_bytes)
        log.info("%s", self.plan)
        self._check_room(free_bytes)
        self.memory.buffer_node = self.plan.buffer_node
        return self.plan.budgets

    def _lay_out(self, parameters: tuple[Parameter, ...]) -> Layout:
        """Lay the state out, so that each path gets several tiles of a subgroup; note the sizes that are chosen."""
        numel = sum(parameter.numel for parameter in parameters)
        self._subgroup_numel = self.config.subgroup_numel or choose_subgroup_numel(
            numel, self.config.staging_bytes, self._empty
        )
        subgroup_bytes = int(self._empty.state.item_bytes * self._subgroup_numel)
        striped_bytes = subgroup_bytes // (TILES_PER_PATH * max(1, len(self.config.path_configs)))
        self._tile_bytes = max(LEAST_TILE_BYTES, min(MAX_TILE_BYTES, striped_bytes))
        return extend_layout(self._empty, parameters, self._subgroup_numel, self._tile_bytes)

    def _check_room(self, free_bytes: int) -> None:
        """Raise `InfeasiblePlanError` if host memory does not suffice for the plan; warn if checkpoints lack room."""
        self._warn_without_checkpoints()
        if self.plan.host_bytes > free_bytes:
            advice = less_memory_advice(self.config, self.plan, free_bytes)
            offers = {"host memory": free_bytes}
            raise InfeasiblePlanError("the plan's host memory", self.plan.host_bytes, offers, advice)
        check_free(self.plan.bytes_by_node, "lower host_memory there, or free some")

    def _warn_without_checkpoints(self) -> None:
        """Warn if the paths have too little room for checkpoints."""
        if self.config.path_configs and not self.plan.has_room_for_checkpoints:
            log.warning(
                "the paths may have too little room for checkpoints: they take up to %d bytes beside the state; "
                "save_checkpoint raises then",
                self.plan.checkpoint_bytes,
            )

    def count_leftovers(self) -> None:
        """At the first step, count as room on the paths only the stores of the checkpoint that was loaded, if any.

        Until then the plan counts the stores of the checkpoint that has most in them, of all that ended sessions have
        left: any may still be loaded. Later calls do nothing.

        Raises:
            InfeasiblePlanError: Checkpoints that the user requires have no room.
        """
        if not self._leftover_bytes:
            return
        loaded_bytes = max((self._leftover_bytes.get(kept.id, 0) for kept in self.saves.kept), default=0)
        if loaded_bytes < self.plan.budgets.leftover_bytes:
            budgets = dataclasses.replace(self.plan.budgets, leftover_bytes=loaded_bytes)
            plan = dataclasses.replace(self.plan, budgets=budgets)
            refuse_without_checkpoints(plan)
            had_room = self.plan.has_room_for_checkpoints
            self.plan = self.views.plan = plan  # machine and lanes never ask for leftover bytes
            if had_room:  # else a warning was given
                self._warn_without_checkpoints()
        self._leftover_bytes = {}

    def _open_lanes(self, filler: Filler) -> None:
        """Open tiers and kernel, and allocate the plan's host memory.

        `ends` closes in reverse order: all that uses memory is closed before memory is freed.
        """
        config = self.config
        self.ends.callback(self.memory.close)
        self.ends.callback(self._close_tiers)
        for number, path in enumerate(config.path_configs):
            self.tiers.append(self.open_tier(number, self._store, path.depth))
            if parse_place(path.path).facts()["file_system"] in MEMORY_FILE_SYSTEMS:
                log.warning("%s lies in memory, which the plan does not count: name a directory on a disk", path.path)
        with cpu_affinity(self._update_cpus):  # threads that the kernel starts stay on these CPUs
            self.kernel = CpuUpdateKernel(self.queue, self._threads)
        self.ends.callback(self.kernel.close)
        self.gradients = self._make_gradients(filler)
        self.ends.callback(self.gradients.close)
        self.ends.callback(self.lanes.close)
        self.memory.allocate_homes(self.plan, self._empty)
        self.memory.allocate_staging(self.plan, slots={})
        self.tables.extend(self.plan.layout)

    def _tune_and_measure(self, known_rates: Rates | None, budgets: Budgets, caller_mark: Mark) -> None:
        """Tune the depth of paths; unless rates are known, measure them, and plan again by them.

        Staging slots serve as buffers for both. With several memory nodes homes may move, as no state lies in them
        yet; else the new plan keeps them.
        """
        memory = self.memory
        for path, tier in zip(self.config.path_configs, self.tiers, strict=True):
            if path.depth is None:
                _tune_depth(tier, self.queue, *memory.staging, verify=self.config.checksum)
        if known_rates is not None:
            self.rates = with_whole_parameters(known_rates, self.plan.layout)
            return
        caller_mark.wait()  # work on the device and the probe would slow each other
        staging_address, _ = memory.staging
        parts = self.kernel, self.tiers, self.queue, staging_address, self.plan, self.lanes
        rates = quick_probe(*parts, verify=self.config.checksum)
        rates = with_whole_parameters(rates, self.plan.layout)
        self.rates = dataclasses.replace(rates, nodes=self._node_rates)
        has_several_nodes = len(self._node_rates) > 1  # then homes may move to other nodes
        kept = None if has_several_nodes else self.plan
        plan = choose_plan(self.plan.layout, budgets, self.rates, self.config.placement, kept=kept)
        if plan != self.plan:
            self.plan = plan
            if has_several_nodes:
                memory.reallocate_homes(plan)
            log.info("%s", self.plan)
            memory.allocate_staging(self.plan, slots={})

    def open_tier(self, number: int, store: uuid.UUID, depth: int | None, used_bytes: int | None = None) -> Tier:
        """Open a store on a path: a new one (`used_bytes` is None), or another session's with so much in use."""
        path = self.config.path_configs[number]
        return open_path(self.config, path, store, self.queue, self.plan.storage_bytes, depth, used_bytes)

    def reopen_tier(self, number: int, store: uuid.UUID, used_bytes: int) -> Tier:
        """Open a store with `used_bytes` in use on a path, with as many requests in flight as its present store."""
        return self.open_tier(number, store, self.tiers[number].depth, used_bytes)

    def allocate(self) -> bool:
        """Make the store slots that the plan needs, and allocate their space on paths; return whether all are there.

        No other process can take space that is allocated. While some is missing, a step may fail for want of it, so
        no save keeps slots on the paths until all are there (`Checkpoints._begin_save`). Missing room is logged once.
        """
        index = self.machine.index
        if index.has_needed_slots or not self.tiers:
            return True
        if self._is_allocating:  # a path has hung in an earlier call; its next transfer raises that
            return False
        self.machine.handle(MakeSlots())
        ends = tuple(map(index.end_bytes, range(len(self.tiers))))

        def allocate_up_to_ends() -> None:
            """Have each store allocate its file; on a thread of its own, as a path may hang."""
            try:
                for tier, nbytes in zip(self.tiers, ends, strict=True):
                    tier.allocate(nbytes)
            finally:
                self._is_allocating = False

        self._is_allocating = True
        timeout_s = self.config.stall_timeout_s
        try:
            has_ended = waits.apart(allocate_up_to_ends, "offload-allocate", lambda: "room on the paths", timeout_s)
        except Exception as error:
            level = logging.DEBUG if self._is_missing_room_logged else logging.WARNING
            log.log(level, "room that steps may need is not there (%s): one of them may fail", error)
            self._is_missing_room_logged = True
        else:
            if has_ended:  # else a path hangs: `_is_allocating` stays set until it answers
                self._is_missing_room_logged = False
                self.machine.handle(Allocated(ends))
        return index.has_needed_slots

    def replace_tier(self, number: int, tier: Tier) -> None:
        """Close a path's store, and send the path's requests to another store from now on."""
        self.tiers[number].close()
        self.tiers[number] = tier

    def _allocate_on_device(self, plan: Plan, before: Layout) -> Plan:
        """Allocate what `plan` adds on the device and in host memory for it; return the plan with gradient bytes."""
        layout, gradient_dtype_of = plan.layout, self._gradient_slots.dtype_of
        # Kernels are compiled for each of these: dtypes of gradient and weight, and format of the state.
        kinds = {(gradient_dtype_of(p), p.dtype, layout.state_of(p).format.code) for p in layout.parameters}
        self.lanes.device.prepare(layout.device_state.rule.name, kinds)
        self.memory.allocate_device(plan, before)
        return self.with_gradient_bytes(plan)

    def with_gradient_bytes(self, plan: Plan) -> Plan:
        """Return a plan with the bytes that its gradients take."""
        budgets = dataclasses.replace(plan.budgets, gradient_bytes=self.gradients.used_bytes(plan))
        return dataclasses.replace(plan, budgets=budgets)

    # Growing

    def plan_with(self, parameters: tuple[Parameter, ...]) -> Plan:
        """Return a plan with more parameters, in which the present state stays where it is.

        Raises:
            InfeasiblePlanError: The new state does not fit.
        """
        before = self.plan
        parameters = self._with_exact_marked(parameters)
        layout = extend_layout(before.layout, parameters, self._subgroup_numel, self._tile_bytes)
        gradient_bytes = self._gradient_slots.total_bytes(layout.parameters)
        budgets = dataclasses.replace(before.budgets, gradient_bytes=gradient_bytes)
        budgets = self.lanes.with_staging(budgets, layout)
        if self.config.host_memory is None and not self.config.paths:  # then it may hold all, as in `first_budgets`
            budgets = dataclasses.replace(budgets, host_bytes=layout.state_bytes)
        try:
            return plan_to_fit(self.config, budgets, partial(self._extend_plan, layout), available_bytes(), before)
        except InfeasiblePlanError:
            # It may need larger staging slots, and the present ones are in use: cut the new state to their size.
            fitting_numel = before.layout.state.fitting_numel(before.slot_bytes)
            if fitting_numel >= self._subgroup_numel or not before.staging_slots:  # smaller subgroups would not help
                raise
            layout = extend_layout(before.layout, parameters, fitting_numel, self._tile_bytes)
            return plan_to_fit(self.config, budgets, partial(self._extend_plan, layout), available_bytes(), before)

    def _extend_plan(self, layout: Layout, budgets: Budgets) -> Plan:
        """Return the present plan extended to a larger layout within budgets."""
        before = self.plan
        # Gradient buffers may become larger, but no fewer, as they may hold gradients: raise the budget to what the
        # same number of larger ones takes. `LEAST_BUFFERS` of them are there whatever the budget is.
        if before.gradient_buffers:
            buffer_bytes = dataclasses.replace(before, layout=layout).gradient_buffer_bytes
            kept_bytes = max(
                budgets.gradients_kept_bytes or 0, (before.gradient_buffers - LEAST_BUFFERS) * buffer_bytes
            )
            budgets = dataclasses.replace(budgets, gradients_kept_bytes=kept_bytes)
        return extend_plan(before, layout, budgets, self.rates, self.config.placement)

    def position(self, parameter: int | str) -> int:
        """Return a parameter's position from its position or name.

        Raises:
            ConfigError: There is no such parameter.
        """
        layout = self.plan.layout
        if isinstance(parameter, str):
            if parameter not in layout.index_by_name:
                raise ConfigError("parameter", parameter, "use a name that the engine was made with")
            return layout.index_by_name[parameter]
        if not 0 <= parameter < len(layout.parameters):
            raise ConfigError("parameter", parameter, f"use a position below {len(layout.parameters)}")
        return parameter

    def use_plan(self, plan: Plan) -> None:
        """Use a plan that keeps all homes: allocate what it adds; on the engine thread, with nothing in flight.

        Raises:
            InfeasiblePlanError: The paths have no room any more.
            OffloadError: There is no memory; nothing has changed then.
        """
        before = self.plan
        # Without staging slots no state is streamed.
        if plan.staging_slots and not self.machine.index.has_room(plan.slot_counts):
            # The plan found room. But tiles are spread by what paths are measured to do: slots for them may have been
            # made where the plan has room for slots of other sizes.
            offers = {path.name: path.available_bytes for path in plan.budgets.paths}
            raise InfeasiblePlanError("the added state", plan.storage_bytes, offers, "free space or add a path")
        # Each of these may find no memory; what was allocated before it is not used then.
        plan = self._allocate_on_device(plan, before.layout)
        self.memory.allocate_homes(plan, before.layout)
        self.gradients.use_plan(plan, before.layout)
        plan = self.with_gradient_bytes(plan)  # which may be less now
        self.lanes.use_plan(plan)
        self.memory.allocate_staging(plan, self.machine.slots)
        self.executor.use_plan(plan)
        self.tables.extend(plan.layout)
        self.machine.handle(Extend(plan))
        self.plan = self.views.plan = plan

    def use_replanned(self, plan: Plan) -> None:
        """Go on with a plan that updates other subgroups on the GPU, as `use_plan`, if there is memory for it.

        Raises:
            OffloadError: There is no memory for it; nothing has changed then.
        """
        gpu_free_bytes = self.lanes.usable_bytes(plan.layout)
        for what, needed_bytes, free_bytes in (
            ("gradient slots in host memory", self.gradients.missing_bytes(plan), available_bytes()),
            ("staging slots on the GPU", self.lanes.missing_bytes(plan), gpu_free_bytes),
        ):
            if needed_bytes > free_bytes:
                raise InfeasiblePlanError(what, needed_bytes, {"what is free": free_bytes}, "free some")
        self.use_plan(plan)

    # The end

    def on_device(self, work: Callable[[], None]) -> None:
        """Do a thread's `work` with the session's device as that thread's current one."""
        with contextlib.suppress(OffloadError):  # a device that has failed has to be closed, too
            self.lanes.device.prepare_thread()
        work()

    def _tell_tiers_kept_slots(self) -> None:
        """Tell the tiers which store slots kept checkpoints refer to, so that closing does not delete these."""
        kept_offsets: dict[int, set[int]] = {}  # by path
        # `named_records`: of a checkpoint whose commit was under way when the session broke.
        for records in [*self.machine.saver.held_records.values(), self.saves.named_records]:
            for record in records.values():
                kept_offsets.setdefault(record.location.path, set()).add(record.location.offset)
        for number, tier in enumerate(self.tiers):
            if kept_offsets.get(number):
                tier.keep(kept_offsets[number])

    def _close_tiers(self) -> None:
        """Close all tiers side by side: one whose device hangs keeps no other open."""
        self.closing = [*self.tiers, *self.others.values()]
        self.others.clear()  # so that `Saves.close`, which comes later, closes none of them again
        closes = [partial(self._close_tier, tier) for tier in self.closing]
        waits.side_by_side(closes, "offload-close", lambda: "")  # `Shutdown` logs what it waits for

    def _close_tier(self, tier: Tier) -> None:
        """Close one tier, and note that it is closed."""
        try:
            tier.close()
        finally:
            self.closing.remove(tier)


def _config_for(config: OffloadConfig, rule: UpdateRule, *, has_gpu: bool) -> OffloadConfig:
    """Return the config with settings as the device, the rule and the place of gradients force them; or refuse."""
    if not has_gpu:
        config = config.updated_by_cpu(combinations.WEIGHTS_ON_CPU)
        if not config.keep_grads and config.gradient_memory is None:
            combinations.SLOTS_ON_CPU.refuse("keep_grads", False)
    elif config.gradient_memory is not None:
        config = config.updated_by_cpu(combinations.GRADIENTS_ON_PATHS)
        config = dataclasses.replace(config, keep_grads=False)
    elif rule.is_whole:
        config = config.updated_by_cpu(combinations.UPDATED_BY_CPU, rule=rule.name)
    return config


def _tune_depth(tier: Tier, queue: CompletionQueue, address: int, nbytes: int, *, verify: bool) -> None:
    """Try how many requests a path should have in flight, use the fastest number, and log it."""
    # Without staging slots there is no memory for a try.
    rate_by_depth = tune_depth(tier, queue, address, nbytes, verify=verify) if nbytes else {}
    rates = ", ".join(f"{rate / 1e9:.2f} GB/s with {depth}" for depth, rate in rate_by_depth.items())
    log.info("path %s: %d requests of each direction in flight (%s)", tier.path, tier.depth, rates or "not tried")
