"""Visits whose state is whole in memory: the copy or device that each waits for, and its run. Pure.

A visit on the GPU copies the state from host memory to one more staging slot, on the GPU, and back; state at home on
the GPU is not copied. The visit ends with its run, and the copy back goes on beside later visits. A visit on the CPU
of a subgroup whose weights lie on the GPU has a weight slot in host memory. Weights that it reads are copied to it
first. Weights that it changes are pushed to the GPU from there: the visit ends when the push is on its lane. The slot
is free when the push has ended, perhaps during the next sweep. A visit::

    ended   | begin                                  | waiting or copying or copied or running
    waiting | its state is read or its copy out ends | copying or running
    waiting | another visit frees what it needs      | copying or running
    copying | its copy ends                          | copied or running
    copied  | another visit frees what it needs      | running
    running | its run ends                           | pushing or ended
    pushing | its copy out ends                      | ended

"Copied" is also a visit of fresh state, which needs a slot only. A copy out may be that of the subgroup's last visit.
A waiting visit may also go on when it is admitted, a save has written its state, or its gradients are in a buffer.

Invariants, verified by `RunQueues.check`:
  * a staging slot on the GPU belongs to at most one subgroup, which is BUSY;
  * a weight slot belongs to at most one visit;
  * a visit runs when its subgroup's state is whole in memory, and only one visit at a time runs on a subgroup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from offload.dtypes import DtypeCode
from offload.errors import invariant, known
from offload.plan.budget import Plan
from offload.protocols import ScratchKind
from offload.schedule.issued import Issued
from offload.schedule.operations import AwaitPush, Operation, RunVisit, Sweep, Transfer, Visit
from offload.schedule.scratch import Scratch
from offload.schedule.staging import BegunVisit, Phase, Slots, Staging

MAX_RUNS_IN_FLIGHT = 2
"""A device is given a second visit while one runs, so that it does not idle while the engine reacts."""

RESIDENT_RUNS_IN_FLIGHT = 4
"""The same where no subgroup is streamed. More are handed over, since another thread may keep Python's lock for 5 ms
(`sys.getswitchinterval`), as long as an update takes on a fast machine. With streamed subgroups that would cost time:
one whose state has just been read would wait until all those visits have run.
docs/published.md has what 2, 3 and 4 make of a simulated step beside such threads."""


def update_visits(
    plan: Plan, order: Iterable[int], reloads: Callable[[int], bool] = lambda subgroup: False
) -> tuple[Visit, ...]:
    """Return the visits of a step that updates these subgroups, each on the device that the plan says.

    Args:
        plan: Where each subgroup is updated.
        order: The subgroups' numbers, in the order of their visits.
        reloads: Whether a subgroup's masters are to be copied from its weights.
    """
    visits = []
    for number in order:
        gpu = plan.updates_on_gpu(number)
        weight_bytes = 0 if gpu else plan.passing_bytes(number)
        # An update reads weights only if they are the masters, or if masters are to be set from them. Else it only
        # writes weights.
        weights_are_masters = plan.layout.subgroups[number].dtype is DtypeCode.FLOAT32
        fetches = weight_bytes > 0 and (weights_are_masters or reloads(number))
        owner = plan.gradients_of(number)
        visits.append(Visit(number, gpu=gpu, weight_bytes=weight_bytes, fetches=fetches, reads=owner))
    return tuple(visits)


@dataclass(slots=True)
class VisitQueue:
    """Subgroups that wait for a resource: a device, or a slot to copy to. They are served in three classes.

    Attributes:
        under_way: Served first: their visits have begun, and occupy a transfer slot.
        streamed: Served next: their state occupies staging slots, for which other subgroups wait.
        resident: Served last: they fill the gaps.
    """

    under_way: deque[int] = field(default_factory=deque)
    streamed: deque[int] = field(default_factory=deque)
    resident: deque[int] = field(default_factory=deque)

    def __bool__(self) -> bool:
        """Return whether any subgroup waits."""
        return bool(self.under_way or self.streamed or self.resident)

    def __contains__(self, subgroup: int) -> bool:
        """Return whether a subgroup waits."""
        return any(subgroup in queue for queue in (self.under_way, self.streamed, self.resident))

    def first(self) -> int:
        """Return the next subgroup."""
        return (self.under_way or self.streamed or self.resident)[0]

    def pop(self) -> int:
        """Remove the next subgroup from its queue and return it."""
        return (self.under_way or self.streamed or self.resident).popleft()

    def clear(self) -> None:
        """Empty the queues."""
        for queue in (self.under_way, self.streamed, self.resident):
            queue.clear()


@dataclass(slots=True)
class DeviceQueues:
    """The CPU or the GPU, and visits that wait for it: their state is whole in host memory, or at home on the device.

    Attributes:
        slots: Transfer slots: staging slots on the GPU, to which state is copied, or the CPU's weight slots.
        copies: Visits that wait for a transfer slot, to copy to it their state (GPU) or the weights they read (CPU).
        ready: Visits that wait for the device; on the CPU perhaps also for a weight slot, to change weights there.
            Those in `ready.under_way` have a transfer slot, and what they read has been copied to it.
        runs: Number of visits that run.
    """

    slots: Slots = field(default_factory=Slots)
    copies: VisitQueue = field(default_factory=VisitQueue)
    ready: VisitQueue = field(default_factory=VisitQueue)
    runs: int = 0


class RunQueues:
    """The visits of the sweep under way whose state is whole in memory and that have not ended."""

    def __init__(self, plan: Plan, staging: Staging, issued: Issued, scratch: Mapping[ScratchKind, Scratch]) -> None:
        self._staging = staging
        self._issued = issued
        self._scratch = scratch
        self._cpu, self._gpu = DeviceQueues(), DeviceQueues()
        self._devices = self._cpu, self._gpu
        self.use_plan(plan)

    @property
    def count(self) -> int:
        """Number of visits that run."""
        return sum(device.runs for device in self._devices)

    def use_plan(self, plan: Plan) -> None:
        """Go on with another plan, while no visit is under way: all transfer slots are free, and none is barred.

        `limit_gpu_slots` has to be called again if not all slots of the new plan may be used.
        """
        self._plan = plan
        for device, count in ((self._cpu, plan.weight_slots), (self._gpu, plan.gpu_slots)):
            device.slots.owners = [None] * count
            device.slots.limit = None

    def limit_gpu_slots(self, count: int) -> None:
        """Set how many of the plan's staging slots on the GPU later visits may use."""
        slots = self._gpu.slots
        invariant(0 <= count <= len(slots.owners), "more staging slots on the GPU than are planned")
        slots.limit = count

    def clear(self) -> None:
        """Empty all queues: the sweep has ended."""
        for device in self._devices:
            device.copies.clear()
            device.ready.clear()

    def device_of(self, visit: Visit) -> DeviceQueues:
        """Return the device on which a visit runs."""
        return self._gpu if visit.gpu else self._cpu

    def queue_of(self, visit: Visit) -> VisitQueue:
        """Return the queue that a visit joins when its state is whole: for a copy first, or for the device."""
        device = self.device_of(visit)
        needs_copy = visit.fetches or (visit.gpu and not self._plan.at_home_on_gpu(visit.subgroup))
        return device.copies if needs_copy else device.ready

    def enqueue_when_readable(self, number: int) -> None:
        """Queue the visit of a subgroup whose state is whole in memory, if nothing else is missing.

        Nothing is done if the subgroup has no visit to come, if the scratch that the visit reads is not in its
        buffer, or if the open sweep does not let it begin yet (`Staging.may_begin`). Whoever makes a missing
        condition true calls this again.
        """
        subgroup = self._staging.subgroups[number]
        visit = subgroup.visit
        if visit is None or not self.has_its_scratch(visit):
            return
        # Only visits of an open sweep have priorities.
        if number in self._staging.priorities and not self._staging.may_begin(number):
            return
        queues = self.queue_of(visit)
        queue = queues.resident if self._plan.is_resident(number) else queues.streamed
        queue.append(number)

    def has_its_scratch(self, visit: Visit) -> bool:
        """Return whether the scratch that a visit reads is in its buffer."""
        return visit.reads is None or self._scratch[visit.reads.kind].is_in_buffer(visit.reads.number)

    def enqueue_fetched(self, operation: Transfer) -> None:
        """Queue a visit to run, as `operation`, the copy to its transfer slot, has ended.

        It was a copy of state to the GPU, or of weights from there.
        """
        device = self._gpu if operation.what == "state" else self._cpu
        device.ready.under_way.append(operation.subgroup)

    def start(self, sweep: Sweep) -> None:
        """Start the runs that the devices have room for."""
        # Without staging slots no subgroup is streamed.
        most_runs = MAX_RUNS_IN_FLIGHT if self._plan.staging_slots else RESIDENT_RUNS_IN_FLIGHT
        for device in self._devices:
            while device.runs < most_runs and device.ready:
                begun = self._begin_next(device)
                if begun is None:
                    break
                device.runs += 1
                self._issue_run(sweep, *begun)

    def _begin_next(self, device: DeviceQueues) -> tuple[Visit, int | None] | None:
        """Take a device's next visit from its queue, to be run.

        Usually the visit begins here. If it has begun before, with a copy to its transfer slot, it goes on.

        Returns:
            The visit and its transfer slot (None if it uses none). None, and the visit stays queued, if it needs a
            weight slot and none is free.
        """
        number = device.ready.first()
        subgroup = self._staging.subgroups[number]
        transfer_slot, visit = subgroup.begun_visit or (None, subgroup.visit)
        visit = known(visit, "a visit that is not there is to run")
        if subgroup.begun_visit is None:  # it begins here
            if visit.weight_bytes:  # a weight slot, for the weights that it changes; it reads none
                transfer_slot = device.slots.assign(number)
                if transfer_slot is None:
                    return None
            self._staging.set_phase(number, Phase.BUSY)
        subgroup.begun_visit = subgroup.visit = None
        device.ready.pop()
        return visit, transfer_slot

    def _issue_run(self, sweep: Sweep, visit: Visit, transfer_slot: int | None) -> None:
        """Issue the run of a visit, whose state and scratch are in memory."""
        subgroup = self._staging.subgroups[visit.subgroup]
        buffer = None
        if visit.reads is not None:
            buffer = self._scratch[visit.reads.kind].buffer_of(visit.reads.number)
        run = RunVisit(
            self._issued.new_op(),
            sweep.number,
            visit,
            subgroup.slot,
            fresh=subgroup.version is None,
            transfer_slot=transfer_slot,
            gradient_buffer=buffer,
        )
        self._issued.issue(run)

    def start_transfers(self) -> None:
        """Give transfer slots to the visits that need a copy to one, and start the copies; the GPU's come first."""
        for device in (self._gpu, self._cpu):
            while device.copies:
                transfer_slot = device.slots.assign(device.copies.first())
                if transfer_slot is None:
                    break
                self._begin_transfer(device, device.copies.pop(), transfer_slot)

    def _begin_transfer(self, device: DeviceQueues, number: int, transfer_slot: int) -> None:
        """Begin a visit, and copy what it reads to its transfer slot: state to the GPU, or weights from there.

        State on its way to the GPU is not copied if it is fresh or will be overwritten: the visit is then queued for
        the device at once.
        """
        subgroup = self._staging.subgroups[number]
        visit, subgroup.visit = known(subgroup.visit, "nobody waits for a transfer"), None
        subgroup.begun_visit = BegunVisit(transfer_slot, visit)
        self._staging.set_phase(number, Phase.BUSY)
        if visit.gpu and (subgroup.version is None or visit.overwrites):
            device.ready.under_way.append(number)
        else:
            self.issue_transfer(visit, "fetch", transfer_slot)

    def issue_transfer(self, visit: Visit, way: Literal["fetch", "flush"], transfer_slot: int) -> None:
        """Start a copy between a transfer slot and the other device's memory: of a visit's state, or of its weights.

        State is copied for a visit on the GPU, weights for one on the CPU; "fetch" is towards the visit's device.
        """
        op, number = self._issued.new_op(), visit.subgroup
        if visit.gpu:
            nbytes = self._plan.layout.subgroups[number].state_bytes
            slot = self._staging.subgroups[number].slot
            transfer = Transfer(op, number, "state", way, transfer_slot=transfer_slot, nbytes=nbytes, slot=slot)
        else:
            nbytes = visit.weight_bytes
            transfer = Transfer(op, number, "weights", way, transfer_slot=transfer_slot, nbytes=nbytes)
        self._issued.issue(transfer)

    def await_push(self, operation: Transfer) -> None:
        """Issue the wait for the end of a push of weights: until then the weight slot cannot be freed.

        `operation` is the push. It has reported back already, when it was queued on its lane.
        """
        self._issued.issue(AwaitPush(self._issued.new_op(), operation.subgroup, operation.transfer_slot))

    def free_slot(self, slot: int, *, gpu: bool) -> None:
        """Free a transfer slot from which no copy reads any more: a staging slot of the GPU, or a weight slot."""
        (self._gpu if gpu else self._cpu).slots.free(slot)

    def check(self, in_flight: Iterable[Operation]) -> None:
        """Verify the module's invariants, for `Machine.check`."""
        subgroups = self._staging.subgroups
        for number, subgroup in enumerate(subgroups):
            if subgroup.begun_visit is not None:
                transfer_slot, visit = subgroup.begun_visit
                owners = self.device_of(visit).slots.owners
                is_right = subgroup.phase is Phase.BUSY and owners[transfer_slot] == number
                invariant(is_right, f"slot {transfer_slot} is not that of the visit of {number}")
        gpu_owners = [owner for owner in self._gpu.slots.owners if owner is not None]
        invariant(len(set(gpu_owners)) == len(gpu_owners), "a subgroup has two GPU slots")
        are_busy = all(subgroups[owner].phase is Phase.BUSY for owner in gpu_owners)
        invariant(are_busy, "the owner of a GPU slot is not busy")
        runs = [operation for operation in in_flight if isinstance(operation, RunVisit)]
        for device in self._devices:
            count = sum(self.device_of(run.visit) is device for run in runs)
            invariant(count == device.runs, f"{device.runs} runs are counted, {count} are in flight")
