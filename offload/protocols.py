"""The nouns that layers share, and the interfaces between deciding and doing.

Nothing here does anything: values, `typing.Protocol`s and the layout of one native structure.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from offload.dtypes import DtypeCode

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

SECTOR_BYTES = 4096
"""Alignment of buffers, store slots and their headers, in memory and in a store."""

NORM_BLOCK_NUMEL = 4096
"""Elements of a block of a gradient, whose squares are added in one fixed order (see `offload.kernels.reference`)."""

MAX_DEPTH = 64
"""Most requests of a direction that a path may have in flight; csrc/io/io_threads.h has the same number."""

MAX_NODES = 1024
"""Memory nodes that Linux knows at most."""

# Errors of a completion that are not an errno; csrc/runtime/completion_queue.h has the same numbers, except the last
# two, which native code never reports.
ERROR_HEADER = -1  # the slot's header is damaged, or is another tile's
ERROR_CHECKSUM = -2  # the data has another checksum than it should have
ERROR_SHORT = -3  # the file ends before the last byte
ERROR_DEVICE = -4  # the GPU has failed
ERROR_CALL = -5  # a call by the engine's helper thread has raised

WAKE = 0
"""Operation id of a completion that only wakes whoever waits for one."""


ACTIVATIONS = 1 << 16
"""`TileId.tensor` of all tiles of activations: a number beyond those of state tensors and of gradients."""


ScratchKind = Literal["gradients", "activations"]
"""Kinds of data that passes through buffers to the paths and back, and is discarded once it has been used."""


class ScratchOwner(NamedTuple):
    """Whose data a scratch buffer has.

    Attributes:
        kind: What the data is.
        number: For gradients the subgroup's index; for activations the tile's number.
    """

    kind: ScratchKind
    number: int


class TileId(NamedTuple):
    """Names one tile: an aligned piece of one state tensor of one subgroup.

    Attributes:
        subgroup: Index of the subgroup.
        tensor: Index of the tensor among the subgroup's; gradients and activations have numbers beyond these.
        tile: Number of the tile in the tensor.
    """

    subgroup: int
    tensor: int
    tile: int


class TileRequest(NamedTuple):
    """One whole-tile transfer between a slot of a store and a buffer in memory.

    Attributes:
        op: Operation id; comes back in the completion.
        tile: Which tile it is; stored in the slot's header and verified on read.
        step: Version of the tile, a number that grows when its content changes; stored and verified likewise.
        offset: Byte offset of the slot in the store, a multiple of `SECTOR_BYTES`.
        address: Memory address of the payload, a multiple of `SECTOR_BYTES`. The buffer belongs to the tier
            until the completion has been taken from the queue.
        nbytes: Payload bytes, a multiple of `SECTOR_BYTES`.
        checksum: On read, the CRC32C that the index expects, or None to accept what the header says. On
            write, that of the payload, or None where it is not known: the tier computes it.
        verify: On read, whether the tier compares the payload with its checksum, if it has one, before the read
            completes. It is False where nobody compares; or where the caller does, before anything uses the payload:
            then `checksum` is given, and a tier may compare all the same. On write, whether the header gets a
            checksum of the payload, which the completion reports. In a slot without one only the header is verified:
            whether its payload was written to the end, only the index knows.
    """

    op: int
    tile: TileId
    step: int
    offset: int
    address: int
    nbytes: int
    checksum: int | None = None
    verify: bool = True


class Completion(NamedTuple):
    """What a lane reports when an operation has ended; see csrc/runtime/completion_queue.h.

    Attributes:
        op: The id that the operation was started with.
        error: 0; or an errno, above 0; or one of the `ERROR_...` codes, below 0.
        detail: After an error, where it happened. Of a tile that was moved, the CRC32C of its payload. Else, or where
            that is not known, 0.
        started_s: When the lane took the operation up, on the monotonic clock.
        finished_s: When it had ended.
    """

    op: int
    error: int
    detail: int
    started_s: float
    finished_s: float


class Queue(Protocol):
    """The one queue that all lanes of a session report to (`offload._native.CompletionQueue`)."""

    def post(self, op: int, error: int = 0, detail: int = 0, started_s: float = 0.0, finished_s: float = 0.0) -> None:
        """Report one completion; any thread."""

    def wait(self, timeout_s: float = -1.0) -> list[tuple[int, int, int, float, float]]:
        """Take all completions that have arrived, as tuples in the order of `Completion`.

        If there are none, wait up to `timeout_s` for the first, or for ever if that is < 0.
        """


class Tier(Protocol):
    """One path of a storage tier: slots that whole tiles are read from and written to.

    Transfers are asynchronous and complete in any order, each with exactly one completion on the queue that
    the tier was opened with: all bytes, or an error. A tier decides nothing: which slot, which tile and which
    path are the caller's choice. All methods but `check_in_place` are called from one thread.
    """

    name: str
    """Kind of tier, for messages: "file", "memory", ..."""

    path: str
    """The path as the user wrote it."""

    depth: int
    """Most requests of each direction in flight at once; what that means to a device is the tier's business."""

    cached: bool
    """Whether transfers go through the system's page cache, so that a short trial says nothing about the device."""

    paid: bool
    """Whether every request costs money, so that none is made just to try something."""

    def read(self, request: TileRequest) -> None:
        """Start reading a slot into memory; it is verified before it completes, as the request says."""

    def write(self, request: TileRequest) -> None:
        """Start writing a tile into a free slot; the header is made from the request."""

    def sync(self, op: int) -> None:
        """Make everything written before durable; completes as operation `op`."""

    def set_depth(self, depth: int) -> None:
        """Limit the requests of each direction in flight to `depth`, 1 to `MAX_DEPTH`; only while none is in flight.

        Raises:
            ConfigError: If it is not such a number.
            TierError: If the system has no resources for it; the depth may then be less than before.
        """

    def allocate(self, nbytes: int) -> None:
        """Allocate the store's bytes below `nbytes` on the disk, if the file system can: nobody else gets that room.

        Raises:
            TierError: There is no room for them; what was allocated before stays so.
        """

    def free_bytes(self) -> int:
        """Return the bytes by which the store may still grow: the file system's room, limited by `max_bytes`."""

    def check_in_place(self) -> None:
        """Check that the path still names the open store; any thread.

        Raises:
            TierError: It does not: the store was deleted or moved, or another disk is mounted there.
        """

    def keep(self, offsets: Collection[int]) -> None:
        """Let `close` leave the store in place, with the slots at these offsets."""

    def close(self) -> None:
        """Finish all requests, free every resource, and delete the store unless `keep` was called; idempotent."""


class SegmentFlag(IntFlag):
    """What an update does to a segment."""

    ACTIVE = 1
    """Update it; without this flag gradient and scalars are ignored."""
    DECOUPLED_DECAY = 2
    """Weight decay as in AdamW; without it, as an L2 term of the gradient."""
    LOAD_MASTER = 4
    """First take the master from the weight (a widening cast); no effect where the weight is the master."""
    ZERO_STATE = 8
    """First take the state beside the master as zero; what the buffers hold is not read."""
    MATCH_MASTER = 16
    """First compare weight and master, and take those elements of the master from the weight that do not round to it.

    So elements that somebody has changed in the weight count, and all others keep their fp32 digits. NaN equals NaN,
    whatever its payload. No effect beside LOAD_MASTER, or where the weight is the master.
    """


TAKES_MASTER = SegmentFlag.LOAD_MASTER | SegmentFlag.MATCH_MASTER
"""Either of these flags takes the master from the weight."""


MAX_STATES = 2  # tensors of a rule's state beside the master
MAX_SCALARS = 11  # numbers of a rule that change from step to step

SEGMENT_DTYPE = np.dtype(
    [
        ("master", np.uint64),
        ("new_master", np.uint64),
        ("master_low", np.uint64),
        ("new_master_low", np.uint64),
        ("weight", np.uint64),
        ("new_weight", np.uint64),
        ("gradient", np.uint64),
        ("state", np.uint64, MAX_STATES),
        ("scales", np.uint64),
        ("numel", np.uint64),
        ("first_index", np.uint64),
        ("rounding_key", np.uint64),
        ("read", np.uint64),
        ("gradient_dtype", np.int32),
        ("weight_dtype", np.int32),
        ("flags", np.uint32),
        ("rule", np.uint32),
        ("state_format", np.uint32),
        ("grad_scale", np.float32),
        ("decay", np.float32),
        ("scalars", np.float32, MAX_SCALARS),
    ]
)
"""One row of an update's segment table, the native `Segment` (csrc/kernels/segment.h).

The first eight fields are memory addresses of the segment's first element:

* `master`: fp32. Where the weight is fp32, the weight *is* the master: `master` points at it and `weight` is 0.
* `weight`: in `weight_dtype`.
* `new_master`, `new_weight`: where the update writes; the old ones are then only read. 0 to write where it reads.
* `gradient`: in `gradient_dtype`.
* `state`: an address for each tensor of state beside the master. `state_format`, the number of a format
  (`offload.formats`), says how they are stored.
* `master_low`, `new_master_low`: for formats that keep the master of a 16-bit weight in two planes. `master` then has
  the upper 16 bits of each element, and `master_low` 8 more.

`scales` is a ninth address, for formats whose elements share scales: those of the first element's block, one byte for
each state tensor; then those of the next block.

`rule` is the number of an update rule, which has names for `state` and `scalars` (`offload.rules.segment_dtype`);
`decay` counts as the flag `DECOUPLED_DECAY` says (`UpdateRule.decoupled`).

State that is rounded stochastically needs two more numbers, which other formats ignore: `first_index`, the index of
the segment's first element in the *unsharded* parameter, which also says where blocks begin, and `rounding_key`,
which `offload.kernels.rounding_keys` returns for this update of the parameter.

Where `read` is not 0 it is the address of two 64-bit sums of fingerprints. The update adds that of the segment's
gradient to the first. Where the weight is fp32 and `new_master` is not 0, it adds that of the weight to the second.
They are fingerprints of the very bytes that the update has read: whoever compares them later knows whether it would
read the same again. Kernels on a GPU ignore `read`.
"""


class Seal(Protocol):
    """Checksums of a subgroup's state in memory, as an update has left it: of its blocks and of its tiles.

    Blocks are what an update works on at a time, tiles what is written to storage.
    """

    def checksum(self, tensor: int, tile: int) -> int:
        """Return the CRC32C of one tile of one state tensor; only once the update has ended without an error."""


class SealedState(NamedTuple):
    """Where the state of a subgroup lies: its tensors, and the segments in them."""

    tensors: list[tuple[int, int, int, int]]
    """For each tensor: memory address, bytes of an item, elements of an item, and bytes in all, padding included."""
    offsets: npt.NDArray[np.uint64]
    """Where each segment begins, in elements, which is the same in all tensors; ascending."""
    numel: int
    """Elements of each tensor, padding included."""
    tile_numel: int
    """Elements of each tile but the last."""


class UpdateKernel(Protocol):
    """Runs optimizer updates on one device, bit for bit as `offload.kernels.reference` defines them."""

    def submit(self, op: int, table: npt.NDArray[Any]) -> None:
        """Start updating the segments of `table` (rows of `SEGMENT_DTYPE`); completes on the queue as `op`.

        The table is copied; the memory it points at must live until the completion.
        """

    def submit_sealed(self, op: int, table: npt.NDArray[Any], state: SealedState, expected: Seal | None) -> Seal:
        """Do as `submit`; also verify each block of the state before it is updated, and seal it afterwards.

        If a block is damaged, the completion has the error `ERROR_CHECKSUM`, and as its detail the number of the
        tensor << 32 | the number of the tile.

        Args:
            op: As for `submit`.
            table: As for `submit`; a row for each segment of `state`.
            state: Where the state lies.
            expected: The seal that the last update of this state has returned; None to verify nothing.

        Returns:
            The seal of the new state.
        """

    def close(self) -> None:
        """Finish what is in flight and end the threads; idempotent."""


class DeviceLane(IntEnum):
    """A lane of a GPU (in CUDA a stream): work that is put on it is done in that order, and later than the call."""

    CALLER = 0
    """Forward and backward: the stream on which the calling thread works."""
    H2D = 1
    """Copies to the device."""
    D2H = 2
    """Copies of state from the device."""
    UPDATE = 3
    """Updates of state, on the device."""
    GRADIENTS = 4
    """Sums of gradients as they arrive during backward, and fingerprints. If gradients of a bucket are copied, too,
    the lane follows `LEAVING` behind the sums of the bucket: a mark on it then says that both have ended."""
    LEAVING = 5
    """Copies of gradients from the device: in backward beside their sums, as both only read; in a step beside state.
    Also, in a step, copies of weights, and in forward those of saved tensors."""
    PIECES = 6
    """Kernels that gather small pieces of device memory into a buffer, which is copied to the host as one, or scatter
    a buffer that has come from there."""


LANES = tuple(lane for lane in DeviceLane if lane is not DeviceLane.CALLER)
"""A session's own lanes: all but `CALLER`."""


class Mark(Protocol):
    """A point between two pieces of work on a lane (CUDA calls it an event)."""

    def reached(self) -> bool:
        """Return whether all work before the mark has been done."""

    def wait(self) -> None:
        """Return when all work before the mark has been done.

        Raises:
            OffloadError: The device failed meanwhile.
        """

    def time_s(self) -> float:
        """Return when the mark was reached, on the monotonic clock; only of a timed mark that has been reached."""


class Device(Protocol):
    """A GPU: memory of its own, lanes, copies, and work that is done later, in the order of each lane.

    Addresses are plain integers, of host or of device memory; the caller keeps that memory alive until the work is
    done. Nothing orders two lanes but `follow`. All methods may be called from any thread; lane `CALLER` is that of
    the thread that calls. They raise `OffloadError` where the device refuses or has failed, and `ConfigError` for
    lane `CALLER` while a CUDA graph is captured from it: a replay would not repeat what depends on that work.
    """

    name: str
    """The device's name, for messages."""

    reserve_bytes: int
    """Bytes of its memory that a session leaves free where it may choose how much to use: others' use of it grows."""

    node: int | None
    """The NUMA node that it is attached to; None where that is not known."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread, one of the session's own, to work for this device; its first call here.

        The device becomes the thread's current one. The thread's later calls do not break captures of CUDA graphs by
        other threads.
        """

    def prepare(self, rule: str, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """Make the kernels of updates and of sums of gradients ready: compile and load them; may take seconds.

        Args:
            rule: Name of the rule of the updates.
            kinds: For each kind of parameters: dtype of gradient, dtype of weight, code of the state format.
        """

    def free_bytes(self) -> int:
        """Return the bytes of its memory that nobody has allocated."""

    def cached_bytes(self) -> int:
        """Return the bytes of its memory that torch's allocator keeps for this process, and no tensor has now."""

    def allocate(self, nbytes: int, caller: Hashable = None) -> int:
        """Return the address of new device memory, aligned to at least 256 bytes.

        Args:
            nbytes: Its size.
            caller: None: any lane may use the memory at once, and `release` frees it. Otherwise it is borrowed, in
                the order of the stream that `caller` has returned: lanes must follow a later `mark_caller` before
                they use it, and `return_borrowed` frees it.

        Raises:
            OffloadError: The device has not so much memory free.
        """

    def release(self, address: int) -> None:
        """Free device memory, which no work uses any more."""

    def return_borrowed(self) -> None:
        """Free all borrowed memory without waiting: it is reused only after the work that is on the lanes now."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Note that work on lane `CALLER` uses a tensor that is about to be dropped.

        Its memory is then reused only after the work that is on that lane now. Without the note, an allocator orders
        reuse by the stream on which the memory was allocated, which may be another one of the user's.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Lock host memory and let the device reach it, so that the device itself can copy from and to it.

        Raises:
            OffloadError: The system does not allow that. Copies work all the same, more slowly.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`; no work uses the memory any more."""

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> Mark:
        """Return a mark after the work that has been put on a lane so far.

        Args:
            lane: The lane.
            timed: Whether the mark has a time; `report` needs one. A mark without a time costs less.
        """

    def caller(self) -> Hashable:
        """Return the stream that lane `CALLER` is for the calling thread now; a user may work on several streams."""

    def mark_caller(self, caller: Hashable) -> Mark:
        """Return an untimed mark after the work so far on a stream that `caller` has returned; on any thread."""

    def follow(self, lane: DeviceLane, mark: Mark) -> None:
        """Let work that is put on a lane from now on wait until a mark of another lane is reached."""

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        """Put a copy between host and device memory on a lane.

        Args:
            lane: The lane: `H2D` copies to the device, all others from it.
            target: Address that is copied to.
            source: Address that is copied from.
            nbytes: How much.
            piece_bytes: Copy in pieces of that size, with a short kernel on the lane behind each, so that copies of
                other streams get in between; 0 for one copy.
        """

    def copy_pieces(self, lane: DeviceLane, pieces: npt.NDArray[np.uint64]) -> None:
        """Put one kernel on a lane that copies many pieces within device memory.

        The kernel reads the pieces from a table, which goes to the device on lane `H2D`; it waits for that.

        Args:
            lane: The lane.
            pieces: Rows of (target, source, bytes), all of them even; no target overlaps anything else. The array is
                copied before this returns.
        """

    def send_table(self, table: npt.NDArray[Any]) -> Any:
        """Put the copy of an update's table to the device on lane `H2D`.

        Copies to the device from two streams may hold each other up for as long as one of them has more. So what an
        update needs comes on one lane: send its table before its state.

        Args:
            table: Rows of segments with device addresses. The array is copied before this returns.

        Returns:
            The argument for one call of `update`; without that call the table goes unused.
        """

    def update(self, sent: Any) -> None:
        """Put an update of segments on lane `UPDATE`, where it waits for its table.

        Args:
            sent: What `send_table` has returned for the table.
        """

    def gradient_blocks(
        self,
        lane: DeviceLane,
        source: int,
        dtype: DtypeCode,
        numel: int,
        blocks: int,
        target: int = 0,
        target_dtype: DtypeCode = DtypeCode.NONE,
        accumulate: bool = False,
    ) -> None:
        """Put one pass over a gradient on a lane: sum the squares of each block, and copy or add it if need be.

        All addresses are the device's. Sums are as `offload.kernels.reference` defines them.

        Args:
            lane: The lane.
            source: Address of the gradient.
            dtype: Its element type.
            numel: Its elements.
            blocks: Address for the sums: float64, shape [ceil(numel / NORM_BLOCK_NUMEL)]. With `accumulate` they are
                those of the result.
            target: Where the gradient is copied or added to; 0 for neither.
            target_dtype: Element type there: the source's, or FLOAT32 to widen; NONE without a target.
            accumulate: Add to what the target holds, as torch adds tensors, instead of copying.
        """

    def sum_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Put a pass over many gradients on a lane: it sums the squares of their blocks, as `gradient_blocks` does.

        Args:
            lane: The lane.
            dtype: Element type of all gradients.
            rows: Rows of (address of a gradient, its elements, address of its sums), as for `gradient_blocks`. The
                array is copied before this returns.
        """

    def fingerprint_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Put a pass over many gradients on a lane: it computes each block's part in its gradient's fingerprint.

        `offload.kernels.reference.fingerprint_parts` defines the parts.

        Args:
            lane: The lane.
            dtype: Element type of all gradients.
            rows: Rows of (address of a gradient, its elements, address of its parts), on the device. The array is
                copied before this returns.
        """

    def report(self, mark: Mark, queue: Queue, op: int) -> None:
        """Post a completion to a queue when a timed mark has been reached; its time is that of the mark.

        Marks of one lane are reported in their order. If the device has failed, the error is `ERROR_DEVICE`.

        Args:
            mark: The mark.
            queue: Gets the completion.
            op: The completion's id.
        """

    def close(self) -> None:
        """Wait for all work, end the threads and free all memory; idempotent."""
