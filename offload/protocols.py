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
"""Alignment of buffers, of slots and of headers."""

NORM_BLOCK_NUMEL = 4096
"""Elements whose squares are summed by one fixed tree (see `offload.kernels.reference`)."""

MAX_DEPTH = 64
"""Most requests of a direction that a path may have in flight; csrc/io/engine.h has the same number."""

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
"""The number of the tensor in the ids of activations' tiles, beyond those of state and of gradients."""


ScratchKind = Literal["gradients", "activations"]
"""Kinds of data that passes through buffers to the paths and back, and is discarded once it has been used."""


class ScratchOwner(NamedTuple):
    """Whose data a scratch buffer has: `number` is a subgroup's for gradients, a tile's for activations."""

    kind: ScratchKind
    number: int


class TileId(NamedTuple):
    """Names one tile: an aligned piece of one state tensor of one subgroup."""

    subgroup: int
    tensor: int
    tile: int


class TileRequest(NamedTuple):
    """One whole-tile transfer between a slot of a store and a buffer in memory.

    Attributes:
        op: Operation id; comes back in the completion.
        tile: Which tile it is; stored in the slot's header and verified on read.
        step: Version of the tile: the step that wrote it; stored and verified likewise.
        offset: Byte offset of the slot in the store, a multiple of `SECTOR_BYTES`.
        address: Memory address of the payload, a multiple of `SECTOR_BYTES`. The buffer belongs to the tier
            until the completion has been taken from the queue.
        nbytes: Payload bytes, a multiple of `SECTOR_BYTES`.
        checksum: On read, the CRC32C that the index expects, or None to accept what the header says. On
            write, that of the payload, or None where it is not known: the tier computes it.
        verify: On read, whether the payload is compared with its checksum, if it has one, before the read completes.
            False where nobody compares it, or the caller does before anything uses it; then `checksum` is given, and
            a tier may compare all the same. On write, whether the header gets a checksum, which the completion
            reports. Without, headers are verified all the same, and only the index tells a finished write from a torn
            one.
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
    """What a lane reports when an operation has ended; see csrc/runtime/completion_queue.h."""

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
        """Take all completions that have arrived; wait up to `timeout_s` for the first, or for ever if it is < 0."""


class Tier(Protocol):
    """One path of a storage tier: slots that whole tiles are read from and written to.

    Transfers are asynchronous and complete in any order, each with exactly one completion on the queue that
    the tier was opened with: all bytes, or an error. A tier decides nothing: which slot, which tile and which
    path are the caller's choice. All methods are called from one thread.
    """

    name: str
    """Kind of tier, for messages: "file", "memory", ..."""

    path: str
    """The path as the user wrote it."""

    depth: int
    """Requests of each direction that are in flight at most; what that means to a device is the tier's business."""

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
            TierError: If the system has no resources for it; what was there before may be less then.
        """

    def allocate(self, nbytes: int) -> None:
        """Allocate the room of slots below byte `nbytes`, if the file system can, so that nobody else takes it.

        Raises:
            TierError: If there is none; what was there before still is.
        """

    def free_bytes(self) -> int:
        """Return the bytes that slots may still grow by: the least of the file system's room and `max_bytes`."""

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
    """First take the elements of the master from the weight where it is not what they round to: all others stay. NaN
    is NaN, whatever its payload. No effect beside LOAD_MASTER, or where the weight is the master."""


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

The first eight fields are memory addresses of the segment's first element. The master is fp32, the state what
`state_format` says; the gradient is in `gradient_dtype`; the weight in `weight_dtype`, or 0 where the weight is fp32
and therefore *is* the master (`master` then points at it). Where `new_master` and `new_weight` are not 0, what is
updated is written there, and the old ones are only read. `state_format` is the number of a format
(`offload.formats`). Where it keeps the master of a 16-bit weight in two planes, the upper 16 bits of each element lie
at `master` and 8 more at `master_low`; where elements share scales, `scales` is the address of those of the first
element's block: one byte for each state tensor, block after block. `rule` is the number of an update rule, which has
names for `state` and `scalars` (`offload.rules.segment_dtype`); `decay` is what `UpdateRule.decoupled` says.

State that is rounded stochastically needs two more numbers, which other formats ignore: `first_index`, the index of
the segment's first element in the *unsharded* parameter, which also says where blocks begin, and `rounding_key`,
which `offload.kernels.rounding_keys` returns for this update of the parameter.

Where `read` is not 0 it is the address of two 64-bit sums. The fingerprints of the segment's gradient and, where the
weight is fp32 and `new_master` is not 0, of that weight are added to them, of the very bytes that the update has
read: whoever compares them later knows whether it would read the same again. Kernels on a GPU do not.
"""


class Seal(Protocol):
    """Checksums of a subgroup's state as an update has left it, by blocks and by tiles."""

    def checksum(self, tensor: int, tile: int) -> int:
        """Return the CRC32C of a tile, once the update has ended well."""


class SealedState(NamedTuple):
    """Where the state of a subgroup lies: its tensors, and the segments in them."""

    tensors: list[tuple[int, int, int, int]]
    """Memory address of each, bytes of an item, elements of an item, and bytes in all, padding included."""
    offsets: npt.NDArray[np.uint64]
    """Where each segment begins in each tensor, in elements; ascending."""
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
        """Do as `submit`; compare each block of the state with a seal before it is updated, and seal it afterwards.

        A block that is not as `expected` completes it with `ERROR_CHECKSUM`, and the number of the tensor << 32 |
        that of the tile as `detail`. Without `expected` nothing is compared.
        """

    def close(self) -> None:
        """Finish what is in flight and end the threads; idempotent."""


class DeviceLane(IntEnum):
    """A stream of a GPU: what is put on it happens in that order, and later than the call."""

    CALLER = 0
    """Forward and backward: the stream on which the calling thread works."""
    H2D = 1
    """Copies to the device."""
    D2H = 2
    """Copies of state from it."""
    UPDATE = 3
    GRADIENTS = 4
    """Sums of gradients, as they arrive during backward; comes after `LEAVING` for each of them."""
    LEAVING = 5
    """Copies of gradients to the host: in backward beside their sums, as both only read; in a step beside state. In a
    step also copies of weights."""
    PIECES = 6
    """Small pieces of device memory on their way to or from a buffer there, which is copied as one."""


LANES = tuple(lane for lane in DeviceLane if lane is not DeviceLane.CALLER)
"""The lanes of a session's own."""


class Mark(Protocol):
    """A point between two pieces of work on a lane (CUDA calls it an event)."""

    def reached(self) -> bool:
        """Return whether all before it has been done."""

    def wait(self) -> None:
        """Return when all before it has been done.

        Raises:
            OffloadError: The device failed meanwhile.
        """

    def time_s(self) -> float:
        """Return when it was reached, on the monotonic clock; only once it has been, and if it is `timed`."""


class Device(Protocol):
    """A GPU: memory of its own, lanes, copies, and work that is done later, in the order of each lane.

    Addresses are plain integers, of host or of device memory; who passes them keeps them alive until the work is
    done. Nothing orders two lanes but `follow`. All methods may be called from any thread; lane `CALLER` is that of
    the thread that calls. They raise `OffloadError` where the device refuses or has failed, and `ConfigError` for
    lane `CALLER` while a CUDA graph is captured from it: a replay would not repeat what depends on that work.
    """

    name: str
    """What it is, for messages."""

    reserve_bytes: int
    """How much of its memory a session leaves free where it may choose: whatever else works there grows."""

    node: int | None
    """The NUMA node that it is attached to; None where that is not known."""

    def prepare_thread(self) -> None:
        """Prepare a thread of the session's own, which calls this first: it works for this device from now on.

        Whatever it asks of the device leaves other devices, and captures of CUDA graphs by other threads, alone.
        """

    def prepare(self, rule: str, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """Make ready what updates by a rule, and sums, need; may take seconds.

        Args:
            rule: Its name.
            kinds: Of parameters: dtypes of the gradient and of the weight, and the code of the state's format.
        """

    def free_bytes(self) -> int:
        """Return the bytes of its memory that nobody has allocated."""

    def cached_bytes(self) -> int:
        """Return the bytes of its memory that torch's allocator keeps for this process, and no tensor has now."""

    def allocate(self, nbytes: int, caller: Hashable = None) -> int:
        """Return the address of new device memory, aligned to at least 256 bytes.

        Args:
            nbytes: How much.
            caller: Borrow it, in the order of a lane that `caller` returned: lanes that use it follow a later
                `mark_caller`, and `return_borrowed` gives it back. None: any lane may use it at once.

        Raises:
            OffloadError: There is not that much.
        """

    def release(self, address: int) -> None:
        """Free device memory, which no work uses any more."""

    def return_borrowed(self) -> None:
        """Free all borrowed memory without waiting: whoever gets it next works behind what is on lanes now."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Note that the caller drops a tensor on the device: its memory is reused only behind what is on its lane.

        An allocator orders memory by the stream that it was allocated on, which may be another one of the user's.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Lock host memory and let the device reach it, so that copies need nobody's help.

        Raises:
            OffloadError: The system does not allow that; copies work without, more slowly.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`; no work uses the memory any more."""

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> Mark:
        """Return the point after what has been put on a lane so far.

        Args:
            lane: Which one.
            timed: Whether it tells its time, as those that are reported have to; one that does not costs less.
        """

    def caller(self) -> Hashable:
        """Return which lane `CALLER` is for the calling thread now; a user may work on several."""

    def mark_caller(self, caller: Hashable) -> Mark:
        """Return the point after what has been put on a lane that `caller` returned, untimed; any thread."""

    def follow(self, lane: DeviceLane, mark: Mark) -> None:
        """Let what is put on a lane from now on wait for a mark of another."""

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        """Put a copy on a lane; one of the addresses, or both, are the device's.

        Args:
            lane: Which one; `H2D` copies to the device, all others from it.
            piece_bytes: Copy in pieces of that size, with something else on the lane behind each, so that copies of
                other streams get in between; 0 for one copy.
        """

    def copy_pieces(self, lane: DeviceLane, pieces: npt.NDArray[np.uint64]) -> None:
        """Put on a lane: copy many pieces of device memory at once. It follows its table, which goes on lane `H2D`.

        Args:
            lane: Which one.
            pieces: Rows of (target, source, bytes), all of them even; no target overlaps anything else. It is copied.
        """

    def send_table(self, table: npt.NDArray[Any]) -> Any:
        """Put the table of an update on lane `H2D`: rows of segments with device addresses. It is copied before.

        Copies to the device from two streams may hold each other up for as long as one of them has more. So what an
        update needs comes on one lane: send its table before its state.

        Returns:
            What `update` takes, once; without that the table goes unused.
        """

    def update(self, sent: Any) -> None:
        """Put an update of segments on lane `UPDATE`, which follows its table."""

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
        """Put on a lane: copy a gradient on the device, or add it to one there, with the sums of its blocks' squares.

        Args:
            blocks: Address of float64, shape [ceil(numel / NORM_BLOCK_NUMEL)], on the device: what
                `offload.kernels.reference` defines, of the sum where it accumulates.
            target: Where it is copied to, or added as torch adds tensors; 0 for nowhere.
            target_dtype: The source's element type, or FLOAT32 to widen; NONE without a target.
            accumulate: Whether it is added.
        """

    def sum_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Put on a lane: sum the squares of many gradients' blocks at once, as `gradient_blocks` does for one.

        Args:
            rows: Of (gradient, elements, blocks), all of `dtype`. They are copied.
        """

    def fingerprint_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """Put on a lane: compute the parts that the blocks of many gradients have in their fingerprints.

        Args:
            rows: Of (gradient, elements, parts), all of `dtype`; on the device, as
                `offload.kernels.reference.fingerprint_parts` defines. They are copied.
        """

    def report(self, mark: Mark, queue: Queue, op: int) -> None:
        """Post completion `op` when a timed mark has been reached, with its time; of one lane's marks in their order.

        A device that has failed posts `ERROR_DEVICE`.
        """

    def close(self) -> None:
        """Wait for all work, end the threads and free all memory; idempotent."""
