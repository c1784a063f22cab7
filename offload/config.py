"""`OffloadConfig`: what a user may say, parsed and validated before a file is touched."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeVar

from offload import combinations
from offload.errors import ConfigError, check_text
from offload.formats import STATE_FORMATS
from offload.protocols import MAX_DEPTH, MAX_NODES
from offload.units import read_number

if TYPE_CHECKING:
    from offload.plan import Budgets, PathBudget

T = TypeVar("T")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

LEAST_WITHOUT_UNIT = 1 << 20
"""Nobody gives so few bytes: whoever writes a smaller number has left out its unit."""

MAX_BYTES = (1 << 63) - 1
MAX_INTEGER = (1 << 62) - 1
MAX_SHARE = 1e100
EXACT_NAMES = ("*embed*", "*lm_head*", "*wte*", "*wpe*")
"""What embeddings and output layers are called: few rows have a gradient in a step, and each row is a token's own."""

MAX_THREADS = 1024
BORROW = "borrow"
OVERLAPS = ("off", "forward", "backward", "both", "auto")
MAX_HOLDERS = 1 << 16


def parse_bytes(field: str, value: object) -> int:
    """Return a size in bytes from an integer or a string such as "8GiB" or "500MB".

    Raises:
        ConfigError: If it is not a size, or a string that seems to lack its unit; names `field`.
    """
    allowed = 'give bytes as an integer >= 0, or a string such as "8GiB" or "500MB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(field, value, allowed)
    if isinstance(value, str):
        found = read_number(value)
        if found is None:
            raise ConfigError(field, value, allowed)
        number, unit = found
        if unit and f"{unit}b" in _UNITS:  # "64G" is 64 GB to some programs, and 64 GiB to others
            said = value.strip().rstrip("iI")
            raise ConfigError(field, value, f'write "{said}iB" (powers of 1024) or "{said}B" (powers of 1000)')
        if unit not in _UNITS:
            raise ConfigError(field, value, allowed)
        size: Decimal | int = number * _UNITS[unit]
        if not unit and 0 < size < LEAST_WITHOUT_UNIT:
            said = value.strip()
            raise ConfigError(field, value, f'give it a unit, such as "{said}GiB"; "{said}B" if bytes are meant')
    else:
        size = value
    if not 0 <= size <= MAX_BYTES:  # before it is made an integer, which may have very many digits
        raise ConfigError(field, value, allowed)
    return int(size)


_NODE = re.compile(r"node(0|[1-9]\d{0,3})", re.ASCII)


def parse_host_memory(field: str, value: object) -> int | dict[str, int]:
    """Return a size in bytes, or a size for each memory node by its name, such as {"node0": 1 << 30}.

    Args:
        field: The name for errors.
        value: A size, or a mapping of "node<number>", as Linux numbers NUMA nodes, to sizes.

    Raises:
        ConfigError: If it is neither; names `field`.
    """
    if not isinstance(value, Mapping):
        return parse_bytes(field, value)
    for name in value:
        match = _NODE.fullmatch(name) if isinstance(name, str) else None
        if match is None or int(match[1]) >= MAX_NODES:
            raise ConfigError(field, name, 'name memory nodes as in {"node0": "200GiB", "node2": "400GiB"}')
    if not value:
        raise ConfigError(field, value, 'give a size, or one for each memory node: {"node0": "200GiB"}')
    found = {str(name): parse_bytes(f"{field}.{name}", size) for name, size in value.items()}
    if sum(found.values()) > MAX_BYTES:
        raise ConfigError(field, value, f"give {MAX_BYTES:,} bytes in all at most")
    return found


def _check_keys(field: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            nearest = f'did you mean "{near[0]}"? ' if near else ""
            raise ConfigError(f"{field}.{key}", values[key], f"unknown key; {nearest}known are {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """One place in a storage tier.

    Attributes:
        path: A directory that exists and can be written (`~`: your home), or "s3://bucket/prefix": endpoint, region
            and credentials from the AWS_* variables (AWS_ENDPOINT_URL for a server that is not AWS) or a profile.
        max_bytes: Most bytes the session may occupy there; None for all that is free.
        share: Weight of this path when tiles are spread over several; only the ratio to the others matters (1 where
            others have one and this has not). None for all: in proportion to measured bandwidth.
        lock_path: Directory that processes take turns on when they use this path (see `OffloadConfig.path_lock`).
            None: `path`. Name one for several paths that lie on one device, or for subdirectories of one path.
        depth: Requests of each direction in flight; None: a few are tried when the session opens.
    """

    path: str
    max_bytes: int | None = None
    share: float | None = None
    lock_path: str | None = None
    depth: int | None = None

    @classmethod
    def parse(cls, field: str, value: object) -> PathConfig:
        """Return a path from a string or a mapping with `path` and any of the other fields.

        Raises:
            ConfigError: If a key is unknown or a value is not usable.
        """
        if isinstance(value, cls):
            value = {item.name: getattr(value, item.name) for item in dataclasses.fields(cls)}
        if isinstance(value, str | os.PathLike):
            value = {"path": os.fspath(value)}
        if not isinstance(value, Mapping) or "path" not in value:
            raise ConfigError(
                field, value, 'give a directory, "s3://bucket/prefix", or {"path": ..., "max_bytes": ...}'
            )
        _check_keys(field, value, [item.name for item in dataclasses.fields(cls)])
        path = os.fspath(value["path"]) if isinstance(value["path"], str | os.PathLike) else value["path"]
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{field}.path", path, "give a directory")
        check_text(f"{field}.path", path)
        path = os.path.expanduser(path)
        max_bytes = value.get("max_bytes")
        if max_bytes is not None:
            max_bytes = parse_bytes(f"{field}.max_bytes", max_bytes)
        share = value.get("share")
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < MAX_SHARE
        ):
            raise ConfigError(
                f"{field}.share", share, "give a number greater than 0, or none to follow measured rates"
            )
        lock_path = value.get("lock_path")
        if isinstance(lock_path, os.PathLike):
            lock_path = os.fspath(lock_path)
        if lock_path is not None and (not isinstance(lock_path, str) or not os.path.isdir(lock_path)):
            raise ConfigError(f"{field}.lock_path", lock_path, "name a directory that exists, or none for `path`")
        if lock_path is not None:
            check_text(f"{field}.lock_path", lock_path)
        depth = value.get("depth")
        if depth is not None:
            check_int(f"{field}.depth", depth, 1, MAX_DEPTH)
        share = None if share is None else float(share)
        return cls(path=path, max_bytes=max_bytes, share=share, lock_path=lock_path, depth=depth)


def _refuses_unknown(cls: type[T]) -> type[T]:
    """Have a dataclass say which fields it has, where it is given others."""
    init, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, **values: Any) -> None:
        _check_keys(cls.__name__, values, known)
        init(self, **values)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_refuses_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where optimizer state may live and how much of each tier it may use.

    Sizes are integers (bytes) or strings such as "8GiB". Values are checked on construction.

    Attributes:
        host_memory: Bytes of host memory for state at home there. None: all of the state without `paths`,
            otherwise up to half of the memory that is available (its part of that, where a launcher has started
            several ranks on the node), and no more than buffers and gradients leave of all of it beside 2 GiB, or
            half where that is less, for forward and backward: all state streams where there is no more. Where host
            memory is of several kinds (sockets, CXL cards), a size for each memory node, by Linux's numbers:
            {"node0": "200GiB", "node2": "400GiB"}. Homes then lie where the step is shortest, and all other memory of
            the session on the fastest of these nodes; memory is bound there.
        gpu_memory: Bytes of GPU memory for state at home there, where weights lie on a GPU. "auto": what is free
            after the first backward pass; nothing if the state is asked for before that. "borrow": no state is at
            home there, and what the step needs of it (staging slots, as many as pay of those that the first backward
            pass leaves room for) is taken when backward has ended, and given back to torch before the next forward
            pass; so "borrow" and `overlap` "forward" exclude each other. More than 0 is refused where weights lie on
            the CPU.
        gradient_memory: Bytes of host memory for gradients. None: for all of them. What does not fit leaves for the
            paths as it arrives, and comes back in the step; "auto": as much as stays in memory as `host_memory` and
            what is available leave. Whether all fit is decided when an optimizer is made. Where they do not, `.grad`
            is None after backward for every parameter, and `optimizer.clip_grad_norm_` and `offload.GradScaler` take
            the place of torch's own; to drop gradients without a step, call `optimizer.zero_grad()`. A few buffers
            come on top, named in the plan. Excludes `overlap` "backward" and "both"; with weights on a GPU the CPU
            updates all.
        paths: Directories or "s3://bucket/prefix" for the state that does not fit; each a string or
            `{"path": ..., "max_bytes": ..., "share": ...}`. Tiles are spread in proportion to the bandwidth that the
            paths are seen to have, step by step, unless a `share` is given.
        staging_memory: Bytes of host memory through which streamed state passes. None: four subgroups, or more where
            rates from a file say that they pay.
        subgroup_numel: Most elements of a subgroup. None: chosen from the model's size.
        threads: CPU threads of the update. None: as many as this process may use (its part of them, as for
            `host_memory`), and two less with weights on a GPU.
        gradient_dtype: "parameter" (gradients in the weight's dtype) or "float32". Those that DDP, FSDP or `shard`
            reduce for the CPU are in the weight's dtype anyway.
        keep_grads: Whether gradients on a GPU stay in `.grad` until the step. If not, they leave during backward, and
            `optimizer.clip_grad_norm_` and `offload.GradScaler` take the place of torch's own; to drop them without a
            step, call `optimizer.zero_grad()`, as `model.zero_grad()` does not find them. Refused where weights lie
            on the CPU.
        checksum: Whether tiles on storage carry a checksum that is verified on every read.
        checkpoints_kept: How many checkpoints' slots stay reserved on the paths. The plan makes sure that there is
            room for them and for the next one. None: 1, or as there is room: without it, saving raises.
        mirror: A directory that exists, or "s3://bucket/prefix", that gets a copy of each committed checkpoint behind
            training: a self-contained one, in a folder of the same name. The plan makes room for one more checkpoint
            on the paths, which is kept while it is copied. Where several are committed meanwhile, the newest is next.
            Checkpoints that are copies anyway are not mirrored.
        io_backend: How directories are read and written: "threads", "asyncio" (through aiofiles), or "auto": threads,
            and asyncio on network file systems without O_DIRECT. "io_uring", of earlier versions, is "threads".
        path_lock: Whether processes of this node take turns on a path: "on" (one at a time), a number (so many at a
            time, the same in all processes), "off", or "auto": off, as long as no device is known on which turns
            pay (bench/lock.py measures yours). The lock is among the processes that see the same /dev/shm; object
            stores and asyncio take no turns.
        stall_timeout_s: Seconds without an answer from any device, with something asked for, after which the session
            gives up on them.
        lock_timeout_s: Seconds of waiting for a turn after which a warning names the process that has it.
        placement: The device that runs updates where weights lie on a GPU: "auto" for whatever the model finds
            fastest, chosen again by what the first steps show, "cpu", "gpu", or the GPU's share from 0 to 1. State at
            home on the GPU is updated there anyway. Where weights lie on the CPU, "auto" and "cpu" are all there is.
        rates: Where the first rates come from; every step refines them. "auto": this machine's file, which
            `offload probe` writes, if there is one that fits and has all paths, else a short probe (about
            half a second; it passes over as much memory as the session takes, up to 512 MiB or three times the
            last-level caches, and at most an eighth of what is free). Or such a file, which must fit.
        state_format: How state is stored, everywhere: "exact" (fp32); "compact16": the master in fp32, the tensors
            beside it in bf16; or "compact8": the upper 24 bits of the master, and 8-bit codes that share scales in
            blocks of 64. Both are rounded stochastically. With Adam and 16-bit weights they take 8 and 5.03 bytes a
            parameter and not 12. The same seed gives the same bits on every placement.
        exact_names: Patterns (as in a shell) of names of parameters that "compact8" keeps exact, as it does all with
            fewer than two dimensions or 4,096 elements. By default those of embeddings and of the output layer.
        seed: What stochastic rounding depends on, beside each parameter's number, update and element; the same on all
            ranks. A checkpoint brings its own.
        shard: Whether each rank of `torch.distributed` keeps and updates state of its rows of every weight alone,
            where gradients are reduced on all, as under DDP; ranks exchange new weights in `step()`. Weights and
            gradients stay whole on every rank. For the optimizers of this package with plain tensors.
        overlap: Where a step is hidden: "off", "forward", "backward", or "both". In the next forward pass of the
            model that `overlap_forward` is given, which has each module wait for its own weights; integrations give
            theirs, and giving one is enough in place of "forward". In backward, where streamed subgroups are updated
            as soon as their gradients are there, each into a version beside the live one. A step that would do the
            same takes it over; else, as when it clips, the time was lost and nothing has changed. That takes room on
            the paths for a second version of that state as far as there is some, and memory for new weights; with
            weights on a GPU the CPU makes these updates. Refused for FSDP1 on several ranks; where FSDP2's weights
            wait in host memory for a GPU, `overlap_backward` needs the model.
            "auto": nowhere, in forward (if a model is given), in backward or in both, of what is possible: each is
            tried for some steps, and what took the first rank least time is kept.
    """

    host_memory: int | str | Mapping[str, int | str] | None = None
    gpu_memory: int | str = "auto"
    gradient_memory: int | str | None = None
    paths: Sequence[str | os.PathLike[str] | Mapping[str, Any] | PathConfig] = ()
    staging_memory: int | str | None = None
    subgroup_numel: int | None = None
    threads: int | None = None
    gradient_dtype: str = "parameter"
    keep_grads: bool = True
    checksum: bool = True
    checkpoints_kept: int | None = None
    mirror: str | None = None
    io_backend: str = "auto"
    path_lock: str | int = "auto"
    stall_timeout_s: float = 300.0
    lock_timeout_s: float = 30.0
    placement: str | float = "auto"
    rates: str | os.PathLike[str] = "auto"
    state_format: str = "exact"
    exact_names: Sequence[str] = EXACT_NAMES
    seed: int = 0
    shard: bool = False
    overlap: str = "off"

    def __post_init__(self) -> None:
        for field, parse in (("host_memory", parse_host_memory), ("staging_memory", parse_bytes)):
            value = getattr(self, field)
            if value is not None:
                self._set(field, parse(field, value))
        if self.gpu_memory not in ("auto", BORROW):
            self._set("gpu_memory", parse_bytes("gpu_memory", self.gpu_memory))
        if isinstance(self.paths, str | os.PathLike | Mapping) or not isinstance(self.paths, Sequence):
            raise ConfigError("paths", self.paths, "give a list of directories")
        self._set("paths", tuple(PathConfig.parse(f"paths[{i}]", p) for i, p in enumerate(self.paths)))
        for field, least in (("subgroup_numel", 1024), ("threads", 1), ("checkpoints_kept", 0)):
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, least)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError("threads", self.threads, f"use at most {MAX_THREADS}, and no more than there are CPUs")
        _check_choice("gradient_dtype", self.gradient_dtype, ("parameter", "float32"))
        for field in ("checksum", "keep_grads", "shard"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(field, getattr(self, field), "use true or false")
        _check_choice("overlap", self.overlap, OVERLAPS)
        self._check_gradient_memory()
        if self.borrows and self.overlaps_forward:
            combinations.BORROWED.refuse("gpu_memory", self.gpu_memory)
        if self.io_backend != "io_uring":  # of earlier versions: taken as threads where a path is opened
            _check_choice("io_backend", self.io_backend, ("auto", "threads", "asyncio"))
        if isinstance(self.path_lock, int):
            check_int("path_lock", self.path_lock, 1, MAX_HOLDERS)
        else:
            _check_choice("path_lock", self.path_lock, ("auto", "on", "off"))
        if self.io_backend == "asyncio" and self.path_lock not in ("auto", "off"):
            combinations.NO_TURNS.refuse("path_lock", self.path_lock)
        for field in ("stall_timeout_s", "lock_timeout_s"):
            timeout_s = getattr(self, field)
            if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e6:
                raise ConfigError(field, timeout_s, "give seconds, greater than 0")
        self._check_mirror()
        self._check_placement()
        _check_choice("state_format", self.state_format, tuple(STATE_FORMATS))
        names = self.exact_names
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError("exact_names", names, 'give a list of patterns like "*embed*"')
        self._set("exact_names", tuple(names))
        check_int("seed", self.seed, 0)
        if not isinstance(self.rates, str | os.PathLike) or not os.fspath(self.rates):
            raise ConfigError("rates", self.rates, 'use "auto" or name a file that `offload probe` wrote')
        self._set("rates", os.path.expanduser(os.fspath(self.rates)))

    def _check_placement(self) -> None:
        value = self.placement
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        if not is_share and value not in ("auto", "cpu", "gpu"):
            raise ConfigError("placement", value, 'use "auto", "cpu", "gpu", or a share of GPU updates from 0 to 1')

    def _check_gradient_memory(self) -> None:
        value = self.gradient_memory
        if value is None:
            return
        if value != "auto":
            self._set("gradient_memory", parse_bytes("gradient_memory", value))
        if not self.paths:
            combinations.WITHOUT_PATHS.refuse("gradient_memory", value, what="gradients")
        if self.overlaps_backward:
            combinations.UPDATES_IN_BACKWARD.refuse("overlap", self.overlap)

    def _check_mirror(self) -> None:
        value = self.mirror
        if value is None:
            return
        name = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(name, str) or not name:
            raise ConfigError("mirror", value, "name a directory or s3://bucket/prefix, or none for no mirror")
        check_text("mirror", name)
        name = os.path.expanduser(name)
        if not self.paths or not self.checkpoints:
            combinations.MIRRORED_COPIES.refuse("mirror", name)
        from offload.tiers import parse_place  # as in `for_rank`

        parts = parse_place(name, "mirror").parts()
        for path in self.path_configs:
            outer = parse_place(path.path).parts()
            if parts[: len(outer)] == outer:
                raise ConfigError("mirror", name, f"name a place outside of {path.path}, on another device")
        self._set("mirror", name)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    @property
    def node_bytes(self) -> dict[int, int]:
        """Bytes of host memory for state on each memory node, by its number; empty where none is named."""
        named = self.host_memory if isinstance(self.host_memory, dict) else {}
        return {int(name.removeprefix("node")): nbytes for name, nbytes in named.items()}

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory for state, on all nodes together; None where nothing was said."""
        return sum(self.node_bytes.values()) if self.node_bytes else self.host_memory  # type: ignore[return-value]

    @property
    def staging_bytes(self) -> int | None:
        """Bytes of host memory for staging slots; None where nothing was said."""
        return None if self.staging_memory is None else int(self.staging_memory)

    @property
    def borrows(self) -> bool:
        """Whether memory of a GPU is used between backward and forward alone."""
        return self.gpu_memory == BORROW

    @property
    def overlaps_forward(self) -> bool:
        """Whether steps are to be hidden in the next forward pass, whoever has the model."""
        return self.overlap in ("forward", "both")

    @property
    def overlaps_backward(self) -> bool:
        """Whether steps are to be hidden in backward, whatever is predicted of it."""
        return self.overlap in ("backward", "both")

    @property
    def checkpoints(self) -> int:
        """How many checkpoints are kept on the paths."""
        return 1 if self.checkpoints_kept is None else self.checkpoints_kept

    @property
    def path_configs(self) -> tuple[PathConfig, ...]:
        """The paths, parsed."""
        return tuple(path for path in self.paths if isinstance(path, PathConfig))

    def budgets(
        self,
        host_bytes: int,
        paths: Sequence[PathBudget],
        *,
        on_gpu: bool,
        gpu_bytes: int,
        gpu_staging_bytes: int,
        gradient_bytes: int,
        gradients_kept_bytes: int | None,
        leftover_bytes: int = 0,
    ) -> Budgets:
        """Return what a plan may use: what is said here, with sizes that depend on a machine and a model.

        Args:
            host_bytes: For `host_memory`.
            paths: What each of `paths` offers.
            on_gpu: Whether the weights lie on a GPU.
            gpu_bytes: For `gpu_memory`.
            gpu_staging_bytes: GPU memory for staging slots.
            gradient_bytes: Host memory that gradients take.
            gradients_kept_bytes: For `gradient_memory`.
            leftover_bytes: What ended sessions have left on the paths.
        """
        from offload.plan import Budgets, NodeBudget  # which most users of a config have no need of

        return Budgets(
            gpu_bytes=gpu_bytes,
            gpu_staging_bytes=gpu_staging_bytes,
            borrows=self.borrows,
            weights_on_gpu=on_gpu,
            gradients_on_gpu=on_gpu and self.keep_grads,
            host_bytes=host_bytes,
            staging_bytes=self.staging_bytes,
            paths=tuple(paths),
            gradient_bytes=gradient_bytes,
            gradients_kept_bytes=gradients_kept_bytes,
            gradient_item_bytes=4 if self.gradient_dtype == "float32" else 0,
            speculates=self.overlaps_backward,
            follow_rates=all(path.share is None for path in self.path_configs),
            checkpoints=self.checkpoints,
            checkpoints_required=bool(self.checkpoints_kept),
            mirrors=self.mirror is not None,
            leftover_bytes=leftover_bytes,
            nodes=tuple(starmap(NodeBudget, self.node_bytes.items())),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str = "offload") -> OffloadConfig:
        """Return a config from the same names as the fields, as read from JSON.

        Args:
            values: The fields.
            name: What errors call the whole.

        Raises:
            ConfigError: If a key is unknown or a value is not usable.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(name, values, "give an object of OffloadConfig's fields")
        _check_keys(name, values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)

    def check_paths(self) -> None:
        """Verify that this machine has the paths, and that they can be written; touches nothing.

        Raises:
            ConfigError: One is not there or cannot be written.
        """
        from offload.tiers import parse_place  # as in `for_rank`

        for number, path in enumerate(self.path_configs):
            parse_place(path.path, f"paths[{number}]").check(f"paths[{number}]")

    def for_rank(self, rank: int) -> OffloadConfig:
        """Return this config with a directory (or prefix) of the rank's own on every path, made if need be.

        So a store says whose it is. Ranks that take turns on a path still share it.

        Raises:
            ConfigError: If a path is not there or cannot be written.
        """
        from offload.tiers import parse_place  # loads native code, which not every config needs

        paths = []
        for number, path in enumerate(self.path_configs):
            field = f"paths[{number}]"
            place = parse_place(path.path, field)
            own = place.for_rank(rank, field)
            paths.append(dataclasses.replace(path, path=own.path, lock_path=path.lock_path or place.lock_path))
        return dataclasses.replace(self, paths=paths)

    def to_json(self) -> str:
        """Return all fields as JSON that `from_dict` reads back."""
        return json.dumps(dataclasses.asdict(self))


def check_int(field: str, value: object, least: int, most: int = MAX_INTEGER) -> None:
    """Refuse what is no integer from `least` to `most`.

    Raises:
        ConfigError: It is none; names `field`.
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else least - 1
    if not least <= number <= most:
        allowed = f">= {least}" if most == MAX_INTEGER else f"from {least} to {most}"
        raise ConfigError(field, value, f"give an integer {allowed}")


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(field, value, "use " + " or ".join(f'"{choice}"' for choice in choices))
