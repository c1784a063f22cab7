"""A run's state and weights, as tensors in host memory or as a table for a kernel."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch

from offload.device.host import HostMemory
from offload.device.none import Lanes
from offload.device.pieces import as_pieces
from offload.dtypes import DtypeCode
from offload.engine.tables import Parameters, StepRows, Tables
from offload.errors import known
from offload.formats import FP32
from offload.kernels import CpuUpdateKernel
from offload.kernels.plain import PIECE_NUMEL
from offload.kernels.reference import TORCH_DTYPES, matched
from offload.kernels.stored import as_fp32, store_rounded, stored_dtype
from offload.kernels.whole import WholeUpdate
from offload.layout import Segment, Subgroup
from offload.plan import Plan
from offload.protocols import SegmentFlag, TileId
from offload.rules import MASTER
from offload.schedule.operations import RunVisit


def tensor_at(address: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a flat tensor over memory that the caller keeps alive."""
    if numel == 0:  # `torch.frombuffer` refuses an empty buffer
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


@dataclass(frozen=True, slots=True)
class View:
    """Host addresses of a run's state and weights."""

    address: int
    """Address of the subgroup's state."""
    weights_address: int | None
    """Address of an image of its weights; None where the weights themselves lie in host memory."""


class StateViews:
    """Views of one session's state; for visitors, on the engine thread."""

    def __init__(self, plan: Plan, tables: Tables, kernel: CpuUpdateKernel, memory: HostMemory, lanes: Lanes) -> None:
        self.plan = plan
        self._tables = tables
        self._kernel = kernel
        self._memory = memory
        self._lanes = lanes

    def _address(self, run: RunVisit) -> int:
        """Return the address of a run's state in host memory: in its staging slot, or at home."""
        if run.slot is None:
            return self._memory.state_address(run.visit.subgroup)
        return self._memory.slot_address(run.slot)

    # Tables of an update

    def work(self, run: RunVisit, rows: StepRows) -> npt.NDArray[Any] | WholeUpdate:
        """Return the kernel's table for a run of a sealed step; for a rule of whole parameters, the update itself.

        Also tell the lanes which new weights they have to push to a GPU after the run. And note that the masters of
        updated parameters are current, as this update takes those that are due.
        """
        lanes, tables = self._lanes, self._tables
        if run.visit.gpu:
            table = tables.make_table(run, lanes.state_address(run), rows)
        else:
            buffer = run.gradient_buffer
            gradients = None if buffer is None else self._memory.buffer_address("gradients", buffer)
            weights = lanes.image(run.transfer_slot)  # None: they are used where they lie, in host memory
            address = self._address(run)
            table = tables.make_table(run, address, rows, weights_address=weights, gradients_address=gradients)
            lanes.will_push(run, table)
        updated_parameters = None if run.fresh else rows.flags != 0  # None for all: a fresh run takes all masters
        tables.note_masters_current(run.visit.subgroup, updated_parameters)
        subgroup = self.plan.layout.subgroups[run.visit.subgroup]
        if not subgroup.state.rule.is_whole:
            return table
        parameters = [self.plan.layout.parameters[segment.parameter] for segment in subgroup.segments]
        return WholeUpdate(table, subgroup, parameters, rows.groups)

    # Tensors

    @contextlib.contextmanager
    def on_host(self, run: RunVisit) -> Iterator[View]:
        """Give a run its state and weights in host memory while this context lasts; changes are copied back after it.

        State at home on the GPU is copied to the bounce buffer. Weights on a GPU have come to a weight slot before.
        """
        lanes, subgroup = self._lanes, run.visit.subgroup
        nbytes = self.plan.layout.subgroups[subgroup].state_bytes
        home = lanes.homes.get(subgroup)
        if home is not None:  # on the GPU
            address = known(self._memory.bounce, "state at home on a GPU, and no buffer for it").address
            if not run.fresh and not run.visit.overwrites:
                lanes.copy_to_host(as_pieces([(home.address, address, nbytes)]))
        else:
            address = self._address(run)
        yield View(address, lanes.image(run.transfer_slot))
        if not run.visit.changes:
            return
        lanes.will_push(run)  # the machine pushes weights after the run; state is copied back here
        if home is not None:
            lanes.copy_to_device([(home.address, address, nbytes)])

    def make_whole(self, run: RunVisit, view: View, due_parameters: Parameters) -> None:
        """Make a run's state whole: fill that of a fresh subgroup, and take masters that are due from their weights.

        Args:
            due_parameters: The parameters whose masters are taken if they are due. A visit that only reads chooses no
                parameter: stored masters stay, and `shown` computes what the reader gets. Of a fresh subgroup all
                masters are taken.
        """
        subgroup = self.plan.layout.subgroups[run.visit.subgroup]
        if not run.fresh and not self._tables.is_due(subgroup.index, due_parameters):
            return
        # An update in which no parameter is active does both, and nothing else.
        idle_rows = self._tables.rows(groups=(), scale=1.0, clip=1.0, active=())
        table = self._tables.make_table(
            run, view.address, idle_rows, weights_address=view.weights_address, due_parameters=due_parameters
        )
        if subgroup.state.rule.is_whole:
            WholeUpdate(table, subgroup)()
        else:
            self._kernel.run(table)

    def weight(self, subgroup: int, segment: Segment, view: View) -> torch.Tensor:
        """Return a segment's weight in host memory."""
        dtype = TORCH_DTYPES[self.plan.layout.subgroups[subgroup].dtype]
        if view.weights_address is None:
            address = int(self._tables.weights[segment.parameter]) + segment.start * dtype.itemsize
        else:
            address = view.weights_address + segment.offset * dtype.itemsize
        return tensor_at(address, segment.numel, dtype)

    @contextlib.contextmanager
    def piece(
        self, run: RunVisit, view: View, segment: Segment, *, sets_master: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield a segment's state in fp32, by names of tensors, while this context lasts.

        fp32 tensors are viewed in place. Others are copies, which are stored again if the visit changes state. With
        `sets_master` a 16-bit weight becomes the rounded master; the stored master has the same rounding.
        """
        layout = self.plan.layout
        subgroup = layout.subgroups[run.visit.subgroup]
        first_index = layout.parameters[segment.parameter].start + segment.start  # in the unsharded parameter
        stored = {}
        for tensor in subgroup.tensors:
            address = view.address + subgroup.offsets[tensor.name] + tensor.format.offset(segment.offset)
            nbytes, dtype = tensor.format.run_bytes(first_index, segment.numel), stored_dtype(tensor.format)
            stored[tensor.name] = tensor_at(address, nbytes // dtype.itemsize, dtype)
        if MASTER not in stored:  # an fp32 weight is the master
            stored[MASTER] = self.weight(subgroup.index, segment, view)
        visit = run.visit
        with as_fp32(subgroup.state, stored, first_index, read=not visit.overwrites, keep=visit.changes) as views:
            yield views
        if sets_master and subgroup.dtype is not DtypeCode.FLOAT32:
            store_rounded(views[MASTER], self.weight(subgroup.index, segment, view))

    def shown(
        self, run: RunVisit, view: View, segment: Segment, views: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[Segment, Mapping[str, torch.Tensor]]]:
        """Yield a segment's state for readers, with the master that its next update would start from.

        Mostly that is the stored master, and the segment is yielded whole. If the master is due it is computed from
        the weight. Then the segment is yielded in pieces, so that computed masters take little memory.

        Args:
            views: The segment's state, from `piece`.

        Yields:
            A segment for each piece, and flat views of its state by name.
        """
        # Of a fresh subgroup `make_whole` has taken all masters.
        due = SegmentFlag(0) if run.fresh else self._tables.how_due(run.visit.subgroup, segment)
        if not due:
            yield segment, views
            return
        weight = self.weight(run.visit.subgroup, segment, view)
        can_be_cut = all(tensor.numel() == segment.numel for tensor in views.values())  # packed state cannot
        piece_numel = PIECE_NUMEL if can_be_cut else segment.numel
        for start in range(0, segment.numel, piece_numel):
            cut = slice(start, start + piece_numel if can_be_cut else None)  # None: all, of tensors of another length
            piece = {name: tensor[cut] for name, tensor in views.items()}
            if SegmentFlag.LOAD_MASTER in due:
                piece[MASTER] = weight[cut].to(torch.float32)
            else:  # MATCH_MASTER: only elements whose weight is not what the master rounds to
                piece[MASTER] = matched(piece[MASTER], weight[cut])
            numel = piece[MASTER].numel()
            yield replace(segment, start=segment.start + start, offset=segment.offset + start, numel=numel), piece

    def gather_tile(self, tile: TileId, address: int) -> None:
        """Copy a tile that a checkpoint saves to `address`: one of state at home on the GPU, or of fp32 weights.

        Tiles of fp32 weights (`Subgroup.weight_tiles`) are gathered from the parameters; padding is zero.
        """
        subgroup = self.plan.layout.subgroups[tile.subgroup]
        if tile.tensor >= len(subgroup.tensors):  # numbers after those of the state's tensors are of weights
            self._gather_weight_tile(subgroup, tile, address)
            return
        offset, nbytes = next((offset, nbytes) for other, offset, nbytes in subgroup.tiles if other == tile)
        temporary_home = self._memory.temporary_home(tile.subgroup)
        if temporary_home is not None:  # in host memory while the session is parked
            ctypes.memmove(address, temporary_home + offset, nbytes)
        else:
            source = self._lanes.homes[tile.subgroup].address + offset
            self._lanes.copy_to_host(as_pieces([(source, address, nbytes)]))

    def _gather_weight_tile(self, subgroup: Subgroup, tile: TileId, address: int) -> None:
        """Copy a tile of fp32 weights from where they are bound to `address`; padding is zero."""
        item_bytes = FP32.item_bytes
        first = tile.tile * subgroup.tile_numel  # the tile's first element, and `end` the one after its last
        nbytes = next(nbytes for other, _, nbytes in subgroup.weight_tiles if other == tile)
        end = first + nbytes // item_bytes
        pieces = []  # (source, target, bytes)
        for segment in subgroup.segments:
            piece_begin, piece_end = max(first, segment.offset), min(end, segment.offset + segment.numel)
            if piece_begin < piece_end:
                weight = int(self._tables.weights[segment.parameter])
                source = weight + (segment.start + piece_begin - segment.offset) * item_bytes
                target = address + (piece_begin - first) * item_bytes
                pieces.append((source, target, (piece_end - piece_begin) * item_bytes))
        self._lanes.copy_to_host(as_pieces(pieces))
        gap = address  # where the last piece ended: zeros from there to the next one, and to the tile's end
        for _, target, size in (*pieces, (0, address + nbytes, 0)):  # an empty piece stands for the end
            ctypes.memset(gap, 0, target - gap)
            gap = target + size
