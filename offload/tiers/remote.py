"""A prefix of a bucket as a path of slots: each version of a tile is an object of its own.

An object holds a slot's header and payload. Its key names tile, version and slot, so a write never replaces an object
that an index may still refer to: the object that a slot held before is deleted once the new one is stored.

Invariants:
  * a slot's key changes only when an object of that key is whole at the store;
  * a key that is being deleted is not written to, and one that is being written is not deleted;
  * nothing outside `<prefix>/offload-<store>/` is touched.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass

from offload.errors import ConfigError, TierError, invariant
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER, ERROR_SHORT, SECTOR_BYTES, Queue, TileRequest
from offload.tiers.common import (
    DEFAULTS,
    SLOT_HEADER_BYTES,
    Owned,
    StoreOptions,
    check_depth,
    check_limits,
    check_request,
    digest_of,
    digest_of_slot,
    make_header,
    memory_of,
    verify_header,
    verify_payload,
)
from offload.tiers.filesystem import PINS_NAME, UNLIMITED_BYTES
from offload.tiers.lane import Lane
from offload.tiers.objects import (
    DELETE_KEYS,
    HASTY,
    PATIENT,
    ObjectClient,
    ObjectError,
    ObjectExistsError,
    ObjectMissingError,
    RetryPolicy,
    S3Client,
    explain_first_error,
    split_url,
)
from offload.tiers.store import READER_NAME, RECORD_NAME, describe_store, describe_user

DEFAULT_DEPTH = 8
"""Requests of each direction: an object store has long latencies, but serves many requests at once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sync:
    """A sync that waits for the writes that were submitted before it; `writes` are their operations."""

    op: int
    writes: set[int]
    started_s: float


class RemoteTier(Owned):
    """Slots as objects of an S3-compatible store, moved by threads of the tier's own.

    The store is everything below `<prefix>/offload-<uuid>/`; `close` deletes it. The store of a session that was
    killed stays until a person deletes it. A forked process cannot use the tier: every method raises there, except
    `close`, which does nothing.

    Args:
        path: "s3://bucket/prefix".
        store: The session's store.
        queue: Where completions go; must outlive the tier.
        options: See `StoreOptions`; extents and backend do not apply.
        client: The client for the bucket; None for `S3Client`. The tier closes it.
        retry: How requests are tried while training; None for `PATIENT`.

    Attributes:
        store_prefix: Prefix of the keys of all objects of this store.

    Raises:
        ConfigError: The bucket cannot be used, which is found out by trying; nothing is left behind there.
        TierError: The store exists already.
    """

    name = "remote"
    cached = False
    paid = True
    _checks_bucket = True  # when it opens, while a person waits

    def __init__(
        self,
        path: str,
        store: uuid.UUID,
        queue: Queue,
        options: StoreOptions = DEFAULTS,
        *,
        client: ObjectClient | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(path)
        bucket, prefix = split_url(path)
        self.depth = depth = DEFAULT_DEPTH if options.depth is None else options.depth
        check_limits(options.max_bytes, depth)
        self.store_prefix = f"{prefix}/offload-{store}/".lstrip("/")
        self._store = store.bytes
        self._queue = queue
        self._max_bytes = options.max_bytes
        self._used_bytes = 0
        self._lock = threading.Condition()
        # All below is read and changed under the lock only.
        self._offsets: list[int] = []  # of `_slots`, sorted
        self._slots: dict[int, tuple[str, int]] = {}  # by offset: the object's key, and where the slot ends
        self._written: dict[str, None] = {}  # keys that may be at the store, in order
        self._reserved: set[str] = set()  # keys that are being written
        self._to_delete: dict[str, None] = {}  # keys
        self._deleting: frozenset[str] = frozenset()  # keys
        self._writing: set[int] = set()  # operations
        self._syncs: list[_Sync] = []
        self._causes: dict[int, str] = {}  # what the store said, by operation
        if client is None:
            s3 = S3Client(path, bucket, retry=HASTY if self._checks_bucket else PATIENT)
            self._client: ObjectClient = s3
            self._open(store, bucket)
            s3.retry = PATIENT if retry is None else retry  # for training
        else:
            self._client = client
            self._open(store, bucket)
        lanes: list[Lane] = []
        try:
            for name, count in (("offload-get", depth), ("offload-put", depth), ("offload-delete", 1)):
                lanes.append(Lane(name, count))
        except RuntimeError as cause:  # the system has no more threads
            for lane in lanes:
                lane.close()
            self._undo_open()
            raise TierError("open", tier=self.name, path=self.path, detail=str(cause)) from cause
        self._reads, self._writes, self._deletes = lanes

    def key(self, request: TileRequest) -> str:
        """Return the key of the object that a write of `request` makes."""
        subgroup, tensor, tile = request.tile
        return f"{self.store_prefix}{subgroup}-{tensor}-{tile}-{request.step}-{request.offset}"

    def read(self, request: TileRequest) -> None:
        """Start reading a slot; see `offload.protocols.Tier`. After an error the buffer holds anything."""
        self.check_open("read")
        check_request(request)
        self._reads.put(lambda: self._read(request))

    def write(self, request: TileRequest) -> None:
        """Start writing a slot; see `offload.protocols.Tier`."""
        self.check_open("write")
        check_request(request)
        end = request.offset + SLOT_HEADER_BYTES + request.nbytes
        if self._max_bytes is not None and end > self._max_bytes:
            self._report(request, errno.ENOSPC, 0, time.monotonic())
            return
        self._used_bytes = max(self._used_bytes, end)
        with self._lock:
            self._writing.add(request.op)
        self._writes.put(lambda: self._write(request))

    def sync(self, op: int) -> None:
        """Complete as `op` once all writes that were submitted before have ended: stored objects are durable."""
        self.check_open("sync")
        started_s = time.monotonic()
        with self._lock:
            if self._writing:
                self._syncs.append(_Sync(op, set(self._writing), started_s))
                return
        self._queue.post(op, 0, 0, started_s, time.monotonic())

    def set_depth(self, depth: int) -> None:
        """Change how many requests are in flight for each direction."""
        self.check_open("set_depth")
        check_depth(depth)
        with self.raising_tier_error("set_depth"):
            for lane in (self._reads, self._writes):
                lane.set_threads(depth)
        self.depth = depth

    def allocate(self, nbytes: int) -> None:
        """Do nothing: an object store has no room to set aside."""
        self.check_open("allocate")

    def free_bytes(self) -> int:
        """Return the bytes by which slots may still grow, headers included."""
        self.check_open("free_bytes")
        max_bytes = UNLIMITED_BYTES if self._max_bytes is None else self._max_bytes
        return max_bytes - self._used_bytes

    def explain(self, op: int) -> str:
        """Return what the store said when an operation failed, and forget it; "" for nothing."""
        with self._lock:
            return self._causes.pop(op, "")

    def close(self) -> None:
        """Finish what is in flight, end the threads, delete this store's objects; idempotent.

        Requests in flight are not tried again, and deletes only a few times, so this ends soon if no server answers.
        """
        if not self.mark_closed():
            return  # closed before, or another process's
        self._client.limit_attempts(1)
        for lane in (self._reads, self._writes, self._deletes):  # deletes last: the writes queue them
            lane.close()
        self._client.limit_attempts(HASTY.attempts)
        self._remove()
        self._client.close()

    # The store

    def _open(self, store: uuid.UUID, bucket: str) -> None:
        """Make the store, and find out by trying whether the bucket can be used; on failure close the client."""
        # "opened_as" identifies this attempt, so that its own record can be recognised.
        self._record = {**describe_store(store), **describe_user(), "opened_as": uuid.uuid4().hex}
        content = json.dumps(self._record).encode()
        stored_content = bytearray(len(content))  # what is read back
        key = self.store_prefix + RECORD_NAME
        trial = self.store_prefix + "trial"
        try:
            try:
                self._client.create(key, content)
            except ObjectExistsError as cause:
                # It is our own record if the answer to an earlier attempt was lost.
                self._client.get_into(key, [memoryview(stored_content)])
                if bytes(stored_content) != content:
                    detail = "a store of this name exists already"
                    raise TierError(
                        "open", tier=self.name, path=self.path, errno=errno.EEXIST, detail=detail
                    ) from cause
            self._written[key] = None  # from here on `_undo_open` deletes the record: it is ours
            size = self._client.get_into(key, [memoryview(stored_content)])
            # Tiles are sent in another way than the record: try that, too.
            self._written[trial] = None  # before the request: the object may be there even if the answer is lost
            self._client.put(trial, [memoryview(content)], digest_of(content))
            self._client.delete([trial])
            del self._written[trial]
        except ObjectError as cause:
            self._undo_open()
            endpoint = self._client.endpoint
            raise ConfigError("paths", self.path, explain_first_error(cause, endpoint, bucket)) from cause
        except BaseException:
            self._undo_open()
            raise
        if size != len(content) or stored_content != content:
            self._undo_open()
            raise ConfigError("paths", self.path, f"{self._client.endpoint} does not return what was stored there")

    def _undo_open(self) -> None:
        """Delete what a failed `_open` has made, and close the client."""
        self._client.limit_attempts(1)
        if self._written:  # else no object is known to be ours: a store of this name may be another session's
            self._remove()
        self._client.close()

    def _remove(self) -> None:
        """Delete the objects of this store; after `keep`, all but those of kept slots, and note the session's end.

        In a kept store its record and pins stay, too, and the notes of sessions that read it: these alone keep others
        from deleting it.
        """
        to_delete = dict(self._written)
        try:
            try:
                # Also objects of requests that were given up before their answers came.
                to_delete.update(dict.fromkeys(self._client.list(self.store_prefix)))
            except ObjectError as error:
                if not error.status:
                    raise  # the server does not answer: each request would wait in vain
                # The credentials may not allow listing: the objects that are known are deleted.
            if self.kept is not None:
                kept_keys = {self._slots[offset][0] for offset in self.kept if offset in self._slots}
                kept_keys |= {self.store_prefix + RECORD_NAME, self.store_prefix + PINS_NAME}
                notes = self.store_prefix + READER_NAME  # what the keys of readers' notes begin with
                to_delete = {key: None for key in to_delete if key not in kept_keys and not key.startswith(notes)}
            self._client.delete(list(to_delete))
            if self.kept is not None:
                self._note_end()
        except ObjectError as error:
            _log.warning(
                "left %d objects in place below %s of %s: %s", len(to_delete), self.store_prefix, self.path, error
            )

    def _note_end(self) -> None:
        """Note in the record of a kept store that its session has ended; `Folder.opened_by` reads the note."""
        content = json.dumps({**self._record, "ended": True}).encode()
        with contextlib.suppress(ObjectError):  # without the note, others on this machine see that the process ended
            self._client.put(self.store_prefix + RECORD_NAME, [memoryview(content)])

    # On the lanes' threads

    def _read(self, request: TileRequest) -> None:
        """Read a slot, a second time if it arrives damaged, and report."""
        started_s = time.monotonic()
        try:
            error, checksum = self._fetch(request)
            if error in (ERROR_HEADER, ERROR_CHECKSUM):
                _log.warning("%s: %s arrived damaged, it is fetched again", self.path, self.key(request))
                error, checksum = self._fetch(request)
        except ObjectMissingError as cause:  # as a file that ends before the slot
            error, checksum = self._note_failure(request, cause, ERROR_SHORT), 0
        except ObjectError as cause:
            error, checksum = self._note_failure(request, cause, cause.errno), 0
        except Exception as cause:  # a lane answers, whatever happens
            error, checksum = self._note_failure(request, cause, errno.EIO), 0
        self._report(request, error, checksum, started_s)

    def _key_to_read(self, request: TileRequest) -> str | None:
        """Return the key of the object in a request's slot; None if the slot is empty."""
        with self._lock:
            slot = self._slots.get(request.offset)
        return slot[0] if slot is not None else None

    def _fetch(self, request: TileRequest) -> tuple[int, int]:
        """Get a slot's object once, and verify it; return error and checksum."""
        key = self._key_to_read(request)
        if key is None:  # reported as a file of slots would: it ends before the slot, or has no header there
            is_beyond_end = request.offset + SECTOR_BYTES > self._used_bytes
            return (ERROR_SHORT if is_beyond_end else ERROR_HEADER), 0
        header = bytearray(SLOT_HEADER_BYTES)
        payload = memory_of(request)
        size = self._client.get_into(key, [memoryview(header), payload])
        if size < SLOT_HEADER_BYTES:
            return ERROR_SHORT, 0
        error, expected = verify_header(bytes(header), self._store, request)
        if error:
            return error, 0
        if size != SLOT_HEADER_BYTES + request.nbytes:
            return ERROR_SHORT, 0
        return (0, 0) if expected is None else verify_payload(request, expected)

    def _write(self, request: TileRequest) -> None:
        """Store an object as the slot's content, and report; after an error, delete what may have been stored."""
        started_s = time.monotonic()
        error = checksum = 0
        key = self.key(request)
        try:
            self._reserve_key(key)
            checksum = self._store_object(key, request)
            self._set_slot(key, request)
        except ObjectError as cause:
            error = self._note_failure(request, cause, cause.errno)
        except Exception as cause:  # a lane answers, whatever happens
            error = self._note_failure(request, cause, errno.EIO)
        if error:
            self._delete_failed(key, request.offset)
        self._report(request, error, checksum, started_s)
        self._finish_syncs(request.op)

    def _reserve_key(self, key: str) -> None:
        """Keep a key from being deleted while it is written; first wait for a delete of it that is under way."""
        with self._lock:
            self._to_delete.pop(key, None)
            self._reserved.add(key)
            self._lock.wait_for(lambda: key not in self._deleting)
            self._written[key] = None  # only now: the end of that delete has removed the key from `_written`

    def _store_object(self, key: str, request: TileRequest) -> int:
        """Store header and payload as one object; return the payload's checksum, 0 if it has none."""
        header, checksum = make_header(self._store, request)
        digest = digest_of_slot(header, checksum, request.nbytes)
        self._client.put(key, [memoryview(header), memory_of(request)], digest)
        return checksum or 0

    def _set_slot(self, key: str, request: TileRequest) -> None:
        """Note that a slot holds the object `key`; delete its former object, and those of slots that it overlaps.

        Objects whose key is being written again are not deleted.
        """
        start = request.offset
        end = start + SLOT_HEADER_BYTES + request.nbytes
        with self._lock:
            # Slots `first` to `beyond`, in the order of their offsets, are those that this slot replaces.
            first = bisect.bisect_left(self._offsets, start)
            if first > 0:
                _, end_before = self._slots[self._offsets[first - 1]]
                if end_before > start:  # the slot before reaches into this one
                    first -= 1
            beyond = bisect.bisect_left(self._offsets, end, first)
            for offset in self._offsets[first:beyond]:
                replaced_key, _ = self._slots.pop(offset)
                if replaced_key not in self._reserved:
                    self._to_delete[replaced_key] = None
            self._offsets[first:beyond] = [start]
            self._slots[start] = (key, end)
            self._reserved.discard(key)
            is_delete_due = bool(self._to_delete)
        if is_delete_due:
            self._deletes.put(self._delete_batch)

    def _delete_failed(self, key: str, offset: int) -> None:
        """Delete the object of a failed write, as the store may have it although its answer did not arrive."""
        with self._lock:
            self._reserved.discard(key)
            present_key, _ = self._slots.get(offset, ("", 0))
            if present_key == key:
                return  # the same version, from an earlier write that succeeded
            self._to_delete[key] = None
        self._deletes.put(self._delete_batch)

    def _delete_batch(self) -> None:
        """Delete up to `DELETE_KEYS` of the objects that are to be deleted; what fails is left to `close`."""
        with self._lock:
            batch = list(self._to_delete)[:DELETE_KEYS]
            for key in batch:
                del self._to_delete[key]
            self._deleting = frozenset(batch)  # of no other batch: the lane of deletes has one thread
        if not batch:
            return  # an earlier call has deleted them all
        try:
            self._client.delete(batch)
            deleted = True
        except Exception as error:
            deleted = False  # `close` tries again
            _log.warning("%d old objects stay until the end below %s: %s", len(batch), self.path, error)
        with self._lock:
            self._deleting = frozenset()
            if deleted:
                for key in batch:
                    self._written.pop(key, None)
            self._lock.notify_all()  # wakes writes of these keys: see `_reserve_key`

    def _note_failure(self, request: TileRequest, cause: Exception, error: int) -> int:
        """Note why an operation failed, for `explain`; return `error`."""
        with self._lock:
            self._causes[request.op] = str(cause)
        return error

    def _report(self, request: TileRequest, error: int, checksum: int, started_s: float) -> None:
        """Post an operation's completion; its detail is the slot's offset after an error, else the checksum."""
        self._queue.post(request.op, error, request.offset if error else checksum, started_s, time.monotonic())

    def _finish_syncs(self, written: int) -> None:
        """Note that the write of operation `written` has ended; complete the syncs that waited for no other write."""
        finished_syncs = []
        with self._lock:
            self._writing.discard(written)
            for sync in self._syncs:
                sync.writes.discard(written)
                if not sync.writes:
                    finished_syncs.append(sync)
            self._syncs = [sync for sync in self._syncs if sync.writes]
        for sync in finished_syncs:
            self._queue.post(sync.op, 0, 0, sync.started_s, time.monotonic())


class ExistingRemoteStore(RemoteTier):
    """Another session's store, for reading: nothing is made, changed or deleted.

    Arguments and attributes are those of `RemoteTier`.

    Raises:
        ConfigError: The bucket cannot be used.
        TierError: There is no such store.
    """

    _checks_bucket = False

    def write(self, request: TileRequest) -> None:
        """Raise: another session's store is never written to."""
        invariant(False, "a store of another session is written to")

    def _open(self, store: uuid.UUID, bucket: str) -> None:
        """Check that the store has a record; on failure close the client."""
        try:
            size = self._client.head(self.store_prefix + RECORD_NAME)
        except ObjectError as cause:
            self._client.close()
            reason = explain_first_error(cause, self._client.endpoint, bucket)
            raise ConfigError("checkpoint", self.path, reason) from cause
        if size is None:
            self._client.close()
            detail = f"there is no store {self.store_prefix}"
            raise TierError("open", tier=self.name, path=self.path, errno=errno.ENOENT, detail=detail)

    def _key_to_read(self, request: TileRequest) -> str | None:
        """Return the key that the writer has made: it follows from the request, so no index of slots is needed."""
        return self.key(request)

    def _remove(self) -> None:
        """Do nothing: the store is another session's."""
