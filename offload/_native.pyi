# One section for each file in csrc/bindings/.

# bind_runtime.cpp
class CompletionQueue:
    def __init__(self) -> None: ...
    def post(
        self,
        op: int,
        error: int = 0,
        detail: int = 0,
        started_s: float = 0.0,
        finished_s: float = 0.0,
    ) -> None: ...
    def exchange(self, op: int, reply: CompletionQueue, quiet_s: float, interrupt_op: int) -> None: ...
    def wait(self, timeout_s: float = -1.0) -> list[tuple[int, int, int, float, float]]: ...

# bind_io.cpp
def crc32c(address: int, nbytes: int, seed: int = 0) -> int: ...
def crc32c_portable(address: int, nbytes: int, seed: int = 0) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, nbytes_b: int) -> int: ...
def crc32c_implementation() -> str: ...
def make_slot_header(
    store: bytes, tile: tuple[int, int, int], step: int, nbytes: int, checksum: int | None = None
) -> bytes: ...
def admit_slot_header(
    raw: bytes,
    store: bytes,
    tile: tuple[int, int, int],
    step: int,
    nbytes: int,
    checksum: int | None = None,
    verify: bool = True,
) -> tuple[int, int | None]: ...
def file_system_magic(path: str) -> int: ...

class StoreFile:
    def __init__(
        self, fd: int, direct: bool, store: bytes, max_bytes: int = 0, extent_bytes: int = 268435456
    ) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    def reserve(self, end: int, exact: bool = False) -> int: ...
    def free_bytes(self) -> int: ...

class IoThreads:
    def __init__(self, queue: CompletionQueue, depth: int, piece_bytes: int) -> None: ...
    def read(
        self,
        file: StoreFile,
        op: int,
        tile: tuple[int, int, int],
        step: int,
        offset: int,
        address: int,
        nbytes: int,
        checksum: int | None = None,
        verify: bool = True,
    ) -> None: ...
    def write(
        self,
        file: StoreFile,
        op: int,
        tile: tuple[int, int, int],
        step: int,
        offset: int,
        address: int,
        nbytes: int,
        checksum: int | None = None,
        verify: bool = True,
    ) -> None: ...
    def sync(self, file: StoreFile, op: int) -> None: ...
    def set_depth(self, depth: int) -> None: ...
    def inject(self, kind: str, nth: int = 1, error: int = 0, limit_bytes: int = 0) -> None: ...
    def close(self) -> None: ...

# bind_kernels.cpp, in part: `offload.kernels.cpu` and `device` have the rest
def update_programs(
    table: int, rows: int, block_numel: int, programs: int, room: int
) -> tuple[str, list[tuple[int, int, int, int, bool, int]]]: ...
def row_programs(sizes: int, rows: int, stride: int, block: int, programs: int, room: int) -> int: ...
def decode(
    form: int,
    first: int,
    beside: int,
    stride: int,
    first_index: int,
    numel: int,
    values: int,
    dtype: int,
    instruction_set: str = "",
) -> None: ...
def encode(
    form: int,
    first: int,
    beside: int,
    stride: int,
    first_index: int,
    numel: int,
    values: int,
    roots: int,
    instruction_set: str = "",
) -> None: ...
