"""A prefix of a bucket as a place: its tier, its stores, and folders of small objects."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence

from offload._native import CompletionQueue
from offload.errors import CheckpointError
from offload.processes import Process
from offload.protocols import Tier
from offload.tiers.common import FileBytes, StoreOptions, check_options_without_threads, filling
from offload.tiers.objects import (
    HASTY,
    PATIENT,
    ObjectMissingError,
    RetryPolicy,
    S3Client,
    import_botocore,
    split_url,
)
from offload.tiers.place import TEMPORARY, Folder, Place, limit_bytes, raising_checkpoint_error
from offload.tiers.remote import ExistingRemoteStore, RemoteTier
from offload.tiers.store import RANK_NAME, READER_NAME, RECORD_NAME, STORE_NAME

_STORE_KEY = re.compile(rf"((?:{RANK_NAME.pattern}/)?{STORE_NAME.pattern})/")
"""What the key of a store's object begins with, below a path: `offload-<uuid>/`, or `rank-<r>/offload-<uuid>/`."""


class Bucket(Place):
    """A `Place` in an object store; its methods are described there.

    Args:
        path: "s3://bucket/prefix".
        field: The setting that errors name.

    Raises:
        ConfigError: The path cannot be the name of a bucket.
    """

    def __init__(self, path: str, field: str = "paths") -> None:
        self.path = self.name = path
        self._bucket_and_prefix = split_url(path, field)

    def check(self, field: str) -> Hashable:
        """See `Place.check`; only that the client is installed. The bucket itself is tried when a store is opened."""
        import_botocore(self.path, field)
        return self._bucket_and_prefix

    def parts(self) -> tuple[str, ...]:
        bucket, prefix = self._bucket_and_prefix
        return ("s3:", bucket, *filter(None, prefix.split("/")))

    def facts(self) -> dict[str, str]:
        """See `Place.facts`; a bucket is known by its name and its endpoint."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
        bucket, _ = self._bucket_and_prefix
        return {"path": self.path, "file_system": "s3", "device": f"{bucket} at {endpoint}"}

    def for_rank(self, rank: int, field: str) -> Bucket:
        """See `Place.for_rank`; nothing is made, as a prefix needs no object of its own."""
        return Bucket(f"{self.path.rstrip('/')}/rank-{rank}", field)

    def open(self, store: uuid.UUID, queue: CompletionQueue, options: StoreOptions) -> Tier:
        """See `Place.open`; no store is taken over here, and nobody takes turns."""
        check_options_without_threads(self.path, options, "requests to an object store take no turns")
        return RemoteTier(self.path, store, queue, options)

    def open_existing(self, store: uuid.UUID, queue: CompletionQueue) -> Tier:
        return ExistingRemoteStore(self.path, store, queue)

    def folder(self) -> BucketFolder:
        return BucketFolder(self.path)

    def store(self, store: uuid.UUID) -> BucketFolder:
        return BucketFolder(f"{self.path.rstrip('/')}/offload-{store}")

    def stores(self, *, ranks: bool = True) -> list[BucketFolder]:
        """See `Place.stores`; a store is recognised by its objects' keys, and its size is the sum of theirs."""
        folder = BucketFolder(self.path, retry=HASTY)  # a person waits for the list
        nbytes_by_store: dict[str, int] = {}
        for key, nbytes in folder.walk():
            match = _STORE_KEY.match(key)
            if match is not None and (ranks or RANK_NAME.match(key) is None):
                name = match[1]
                nbytes_by_store[name] = nbytes_by_store.get(name, 0) + nbytes
        return [
            BucketFolder(f"{folder.path}/{name}", nbytes, retry=HASTY)
            for name, nbytes in sorted(nbytes_by_store.items())
        ]


class BucketFolder(Folder):
    """A `Folder` (which describes the methods) in an object store: objects are whole or not there, and have no locks.

    Args:
        path: "s3://bucket/prefix".
        nbytes: Bytes of all its objects; None if that is not known.
        retry: How requests are tried.
    """

    fails_late = True

    def __init__(self, path: str, nbytes: int | None = None, *, retry: RetryPolicy = PATIENT) -> None:
        self.path = self.label = path.rstrip("/")
        self._nbytes = nbytes
        bucket, prefix = split_url(path, "checkpoint")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = S3Client(path, bucket, retry=retry)

    def hasten(self) -> None:
        self._client.retry = HASTY

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`; the object's size is asked for first, so that no object larger than allowed is read."""
        key = self._prefix + name
        with raising_checkpoint_error("read", f"{self.path}/{name}"), contextlib.suppress(ObjectMissingError):
            nbytes = self._client.head(key)
            if nbytes is None:
                return None
            if nbytes > limit_bytes(name):
                raise CheckpointError(f"cannot read {self.path}/{name}: it has {nbytes} bytes")
            content = bytearray(nbytes)
            if nbytes and self._client.get_into(key, [memoryview(content)]) != nbytes:
                raise CheckpointError(f"{self.path}/{name} changed while it was read; try again")
            return bytes(content)
        return None  # it was deleted between the two requests

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> None:
        with raising_checkpoint_error("read", f"{self.path}/{name}"):
            nbytes = self._client.get_into(self._prefix + name, pieces)
        if nbytes != sum(len(piece) for piece in pieces):
            raise CheckpointError(f"{self.path}/{name} is damaged: it has another size than was written")

    @contextlib.contextmanager
    def content(self, name: str, scratch: str | None) -> Iterator[FileBytes]:
        """See `Folder.content`; the object is received straight into the temporary file, which is mapped for that."""
        where = f"{self.path}/{name}"
        with contextlib.ExitStack() as ends:
            with raising_checkpoint_error("read", where):
                nbytes = self._client.head(self._prefix + name)
                if nbytes is None:
                    raise CheckpointError(f"cannot read {where}: there is no such object")
                file = ends.enter_context(tempfile.TemporaryFile(dir=scratch))
                with filling(file.fileno(), nbytes) as whole:
                    self.read_into(name, [whole])
            yield FileBytes(file.fileno(), nbytes)

    def identity(self) -> str:
        """Return "": nothing tells a copy from the original."""
        return ""

    def write(self, name: str, content: bytes | Iterable[memoryview] | FileBytes, *, begun: str = "") -> None:
        """Put one object, whole and durable when this returns; `begun` is ignored, as there are no locks."""
        whole = memoryview(content) if isinstance(content, bytes) else content
        # `put` takes a list: of one buffer, or of the pieces that `content` yields.
        buffers = [whole] if isinstance(whole, FileBytes | memoryview) else [*whole]
        with raising_checkpoint_error("write", f"{self.path}/{name}"):
            self._client.put(self._prefix + name, buffers)

    def delete(self, name: str) -> None:
        with raising_checkpoint_error("delete", f"{self.path}/{name}"):
            self._client.delete([self._prefix + name])

    def names(self) -> list[str]:
        """See `Folder.names`; a key with a slash is that of an object further below."""
        with raising_checkpoint_error("list", f"{self.path}/"):
            keys = self._client.list(self._prefix)
        names = (key.removeprefix(self._prefix) for key in keys)
        return sorted(name for name in names if "/" not in name)

    def prepare(self) -> None:
        """See `Folder.prepare`; there is nothing to make, so a trial object is all."""
        name = f"{TEMPORARY}{uuid.uuid4().hex}"
        retry, self._client.retry = self._client.retry, HASTY  # the training waits
        try:
            self.write(name, b"trial")
            self.delete(name)
        finally:
            self._client.retry = retry

    def walk(self) -> list[tuple[str, int]]:
        with raising_checkpoint_error("list", f"{self.path}/"):
            sizes = self._client.sizes(self._prefix)
        return sorted((key.removeprefix(self._prefix), nbytes) for key, nbytes in sizes.items())

    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.walk()) if self._nbytes is None else self._nbytes

    def opened_by(self) -> str:
        """Return who may still use the store, for messages; "" for nobody.

        The session that made the store has left a record in it, and each session that reads it a note. The first of
        these whose process is not known to have ended may use it. A record or note that is missing, or empty, counts
        as that of a process that has ended.
        """
        with raising_checkpoint_error("list", f"{self.path}/"):
            notes = self._client.list(self._prefix + READER_NAME)
        for name in (RECORD_NAME, *(key.removeprefix(self._prefix) for key in notes)):
            try:
                note = json.loads(self.read(name) or b'{"ended": true}')
                process = note.get("process")
                user = f"process {note.get('pid', '?')} on {note.get('host', '?')}"
            except (ValueError, AttributeError, RecursionError) as cause:
                raise CheckpointError(str(cause)) from cause
            has_ended = note.get("ended") is True
            is_process = isinstance(process, list) and list(map(type, process)) == [str, int, str]
            if is_process:  # the fields of a `Process`; anybody may have written the note
                has_ended |= Process(*process).has_ended()
            if not has_ended:
                return user
        return ""

    def remove(self) -> None:
        """See `Folder.remove`.

        Descriptions (*.json) go last, so that an interrupted delete can be recognised and finished.
        """
        with raising_checkpoint_error("delete", f"{self.path}/"):
            keys = self._client.list(self._prefix)
            descriptions = [key for key in keys if key.endswith(".json")]
            self._client.delete([key for key in keys if key not in descriptions])
            self._client.delete(descriptions)

    remove_tree = remove
