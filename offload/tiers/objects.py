"""Objects in a bucket: what the remote tier needs of an object store, and a client for S3-compatible ones.

botocore finds credentials, region and endpoint, and signs; http.client moves the bytes of tiles between the socket
and the caller's memory, so that nothing is copied in between. Every request has a time limit, and is tried again a
bounded number of times if that can help.

Not done here: proxies (the proxy variables of the environment do not apply to tiles), and checksums of parts of a
multipart upload; readers verify what they get.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import logging
import os
import random
import re
import ssl
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from offload.errors import ConfigError, TravellingError
from offload.tiers.common import FileBytes

if TYPE_CHECKING:
    from types import ModuleType

PIECE_BYTES = 1 << 20
"""Most that one call on a socket moves: the time limit of a request is checked after each."""

MULTIPART_BYTES = 64 << 20
PART_BYTES = 32 << 20
"""Objects above the first size are uploaded in parts of the second; S3 allows parts from 5 MiB on."""

DELETE_KEYS = 1000
"""Most keys that S3 deletes in one request."""

LEAST_BYTES_PER_S = 1 << 20
"""A transfer slower than this on average is given up and tried again."""

URL_SECONDS = 3600
"""How long a signed URL is valid."""

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name a server other than AWS."""

INSTALL = "install its client with: pip install 'offload[s3]'"

_URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9])(/.*)?", re.DOTALL)

# Errors after which another attempt may succeed, although their status blames the request.
_TRANSIENT_CODES = frozenset(
    {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentChecksumMismatch", "OperationAborted"}
)
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_ADVICE = {
    "ExpiredToken": "the credentials have expired: renew them",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
}
_ACCESS_CODES = frozenset({"InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a request is tried.

    The wait before attempt n + 1 is `first_delay_s * 2**(n - 1)`, at most `longest_delay_s`, times a random number
    from 0.5 to 1, so that clients that failed together do not try again together.

    Attributes:
        attempts: Most attempts, the first included.
        connect_timeout_s: For making a connection.
        stall_timeout_s: For each piece of a transfer, and for the answer to begin.
    """

    attempts: int = 10
    first_delay_s: float = 0.1
    longest_delay_s: float = 10.0
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 20.0


PATIENT = RetryPolicy()
"""While training: survives half a minute without a server, and ends before a session calls a lane stuck."""

HASTY = RetryPolicy(attempts=3, stall_timeout_s=10.0)
"""While a configuration is checked: a person is waiting for the answer."""


class ObjectError(TravellingError):
    """A request to an object store failed for good, or (within this module) for now.

    Attributes:
        code: The store's name for it ("AccessDenied"), or the exception's.
        status: HTTP status; 0 if there was no answer.
        errno: The most similar system error.
        transient: Whether another attempt may succeed.
    """

    def __init__(self, what: str, *, code: str, status: int = 0, errno: int, transient: bool) -> None:
        self.code = code
        self.status = status
        self.errno = errno
        self.transient = transient
        super().__init__(what)


class ObjectMissingError(ObjectError):
    """There is no object of that key."""


class ObjectExistsError(ObjectError):
    """There is an object of that key already."""


class ObjectClient(Protocol):
    """One bucket. Buffers are read and written in place; all methods may be called from any thread.

    Every method raises `ObjectError` if it cannot do what its name says.
    """

    endpoint: str
    """Where requests go, for messages."""

    def get_into(self, key: str, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers`, one after the other, from the start of an object; return the object's size in bytes.

        If the object is smaller, the rest of the buffers is not written; if it is larger, its rest is not read.
        """

    def put(self, key: str, buffers: Sequence[memoryview | FileBytes], crc32c: int | None = None) -> None:
        """Make an object whose content is `buffers`, one after the other; it is there whole or not at all.

        `crc32c` is the checksum by which the store verifies the content; None for no verification.
        """

    def create(self, key: str, content: bytes) -> None:
        """Make a small object; `ObjectExistsError` if there is one of that key already."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there counts as deleted."""

    def list(self, prefix: str) -> list[str]:
        """Return all keys that begin with `prefix`."""

    def head(self, key: str) -> int | None:
        """Return an object's size in bytes, or None if there is none."""

    def limit_attempts(self, most: int) -> None:
        """Try requests at most `most` times from now on, also those under way; with 1, waits between tries end."""

    def close(self) -> None:
        """Free connections, with nothing in flight; idempotent."""


def split_url(path: str, field: str = "paths") -> tuple[str, str]:
    """Return bucket and prefix (without leading and trailing slashes) of "s3://bucket/prefix".

    Raises:
        ConfigError: The path is not of this form.
    """
    match = _URL.fullmatch(path)
    if match is None:
        raise ConfigError(field, path, "name a bucket and a prefix: s3://bucket/prefix")
    return match[1], (match[2] or "").strip("/")


class Quiet(logging.Filter):
    """Drops log records of botocore at INFO and below, on threads where one of our clients is using botocore.

    For each client, botocore logs where it has found credentials and endpoint: that would be twice a checkpoint and
    path. The application's own use of botocore is logged as before.
    """

    loggers = "client", "configprovider", "credentials", "endpoint_provider", "tokens", "utils"
    """botocore's loggers that log at INFO; a filter of a logger does not apply to the loggers below it."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = threading.local()
        for name in self.loggers:
            logging.getLogger(f"botocore.{name}").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; called by `logging`."""
        is_ours = getattr(self._threads, "ours", False)
        return record.levelno > logging.INFO or not is_ours

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Mark this thread as using botocore for one of our clients while the context lasts."""
        self._threads.ours = True
        try:
            yield
        finally:
            self._threads.ours = False


quiet = Quiet()
_loaders: list[Any] = []
"""The first client's loader of service descriptions, which all later ones share; empty before there is one. Loading
takes six times as long as all else that botocore does to make a client."""


def import_botocore(path: str, field: str = "paths") -> ModuleType:
    """Import botocore with the parts used here, and return it.

    Raises:
        ConfigError: It is not installed; names `field` and `path`.
    """
    try:
        import botocore.config
        import botocore.exceptions
        import botocore.session
    except ImportError as cause:
        raise ConfigError(field, path, INSTALL) from cause
    return botocore  # type: ignore[no-any-return]


def explain_first_error(error: ObjectError, endpoint: str, bucket: str) -> str:
    """Return a message for the user, whose first request to a bucket has failed: what is wrong, and what to do."""
    text = f"{endpoint} answers: {error}"
    if error.code in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            f"no complete credentials for {endpoint} were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_PROFILE"
        )
    if error.code in _ADVICE:
        return text
    if error.code in _ACCESS_CODES:
        return f"{text}; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE)"
    if error.code == "NoSuchBucket":
        return f"{text}; there is no bucket {bucket!r}: create it, or check its name, the region and AWS_ENDPOINT_URL"
    if error.status == 403:
        return (
            f"{text}; these credentials need to put, get, list and delete objects there: change the bucket's policy"
        )
    if error.status in (301, 307, 400):
        return f"{text}; set AWS_REGION to the bucket's region"
    if error.status == 0:
        return f"{endpoint} cannot be reached ({error}): check AWS_ENDPOINT_URL and the network"
    return f"{text}; check AWS_ENDPOINT_URL, or try again later"


class S3Client:
    """One bucket of an S3-compatible store: an `ObjectClient`, which describes the methods.

    Endpoint, region, profile and credentials are botocore's: AWS_* variables and ~/.aws. A server that is not AWS is
    addressed by path unless the profile says otherwise.

    Args:
        path: "s3://bucket/prefix", for messages.
        bucket: The bucket's name.
        retry: How requests are tried.
        multipart_bytes: Objects larger than this are uploaded in parts.
        part_bytes: Size of these parts.

    Attributes:
        retry: May be changed between requests.

    Raises:
        ConfigError: botocore is not installed, or its configuration cannot be used.
    """

    def __init__(
        self,
        path: str,
        bucket: str,
        *,
        retry: RetryPolicy = PATIENT,
        multipart_bytes: int = MULTIPART_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.retry = retry
        self._bucket = bucket
        self._multipart_bytes = multipart_bytes
        self._part_bytes = part_bytes
        self._most_attempts = sys.maxsize  # until `limit_attempts` only the policy limits attempts
        self._gives_up = threading.Event()  # ends waits between attempts
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []  # to be used again, with their host and port
        self._lock = threading.Lock()
        self._botocore = import_botocore(path)
        try:
            with quiet.ours():
                session = self._botocore.session.get_session()
                _loaders[:] = _loaders or [session.get_component("data_loader")]
                session.register_component("data_loader", _loaders[0])
                self._client = self._make_addressed_client(session)
                self.endpoint = str(self._client.meta.endpoint_url)
                certificates = session.get_config_variable("ca_bundle")
            self._tls = ssl.create_default_context(cafile=certificates) if self.endpoint.startswith("https") else None
        except (self._botocore.exceptions.BotoCoreError, OSError, ValueError) as cause:
            raise ConfigError("paths", path, f"the S3 client refuses its settings: {cause}") from cause

    def _make_addressed_client(self, session: Any) -> Any:
        """Return botocore's client for S3, addressed as configured, else by path unless the server is AWS."""
        configured = (session.get_scoped_config().get("s3") or {}).get("addressing_style")
        has_endpoint = any(name in os.environ for name in ENDPOINT_VARIABLES)
        style = configured or ("path" if has_endpoint else "auto")
        client = self._make_client(session, style)
        # Only a client knows its endpoint, which a profile may name, too: so the first style was a guess.
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        right_style = configured or ("auto" if is_aws else "path")
        return client if right_style == style else self._make_client(session, right_style)

    def _make_client(self, session: Any, style: str) -> Any:
        """Return botocore's client for S3, with a style of addressing: "path", "virtual" or "auto"."""
        settings: dict[str, Any] = {
            "connect_timeout": self.retry.connect_timeout_s,
            "read_timeout": self.retry.stall_timeout_s,
            "retries": {"total_max_attempts": 1},  # attempts are counted here
            "s3": {"addressing_style": style},
            "signature_version": "s3v4",
            # No checksums that botocore would add by default, and that some servers refuse.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        return session.create_client("s3", config=self._botocore.config.Config(**settings))

    def get_into(self, key: str, buffers: Sequence[memoryview]) -> int:
        return self._with_retries(f"get {key}", lambda: self._get(key, buffers))

    def put(self, key: str, buffers: Sequence[memoryview | FileBytes], crc32c: int | None = None) -> None:
        nbytes = sum(len(buffer) for buffer in buffers)
        if nbytes > self._multipart_bytes:  # the store then verifies no checksum: `crc32c` is that of the whole
            self._put_parts(key, buffers, nbytes)
            return
        arguments: dict[str, Any] = {"Key": key}
        headers: dict[str, str] = {}
        if crc32c is not None:
            # An argument, too: what the URL's signature covers can neither be dropped nor changed on the way.
            arguments["ChecksumCRC32C"] = base64.b64encode(crc32c.to_bytes(4, "big")).decode()
            headers["x-amz-checksum-crc32c"] = arguments["ChecksumCRC32C"]
        self._with_retries(f"put {key}", lambda: self._send("put_object", arguments, buffers, headers))

    def create(self, key: str, content: bytes) -> None:
        """See `ObjectClient.create`; a server that ignores the condition `IfNoneMatch` overwrites the object."""
        self._request(f"create {key}", "put_object", Key=key, Body=content, IfNoneMatch="*")

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_KEYS):
            batch = [{"Key": key} for key in keys[start : start + DELETE_KEYS]]
            answer = self._request("delete objects", "delete_objects", Delete={"Objects": batch, "Quiet": True})
            for failed in answer.get("Errors", []):
                code = str(failed.get("Code", "unknown"))
                what = f"delete {failed.get('Key')}: {code} {failed.get('Message', '')}"
                status = 403 if code == "AccessDenied" else 400  # the answer has none for each key
                raise ObjectError(what, code=code, status=status, errno=_errno_of(status), transient=False)

    def list(self, prefix: str) -> list[str]:
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return all keys that begin with `prefix`, and the size of each object in bytes."""
        nbytes_by_key: dict[str, int] = {}
        continuation: dict[str, str] = {}
        while True:
            answer = self._request(f"list {prefix}", "list_objects_v2", Prefix=prefix, **continuation)
            nbytes_by_key.update((str(item["Key"]), int(item["Size"])) for item in answer.get("Contents", []))
            if not answer.get("IsTruncated"):
                return nbytes_by_key
            continuation = {"ContinuationToken": answer["NextContinuationToken"]}

    def head(self, key: str) -> int | None:
        try:
            return int(self._request(f"head {key}", "head_object", Key=key)["ContentLength"])
        except ObjectMissingError:
            return None

    def limit_attempts(self, most: int) -> None:
        self._most_attempts = most
        if most > 1:
            self._gives_up.clear()
        else:
            self._gives_up.set()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
        self._client.close()

    # Attempts

    def _with_retries(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` until it succeeds, fails for good, or has been tried often enough; see `RetryPolicy`."""
        retry = self.retry
        attempts = 0
        while True:
            attempts += 1
            try:
                return attempt()
            except ObjectError as error:
                if not error.transient or attempts >= min(retry.attempts, self._most_attempts):
                    raise
                delay_s = min(retry.longest_delay_s, retry.first_delay_s * 2.0 ** (attempts - 1))
                delay_s *= random.uniform(0.5, 1.0)
                _log.info("%s: %s; attempt %d follows in %.1f s", what, error, attempts + 1, delay_s)
                self._gives_up.wait(delay_s)
                if self._gives_up.is_set():  # `limit_attempts(1)` has ended the wait
                    raise

    def _request(self, what: str, method: str, **arguments: Any) -> dict[str, Any]:
        """Make a small request through botocore's client; `what` names it in errors."""
        exceptions = self._botocore.exceptions

        def attempt() -> dict[str, Any]:
            """Call the method once, and raise its errors as `ObjectError`."""
            try:
                with quiet.ours():  # credentials may be renewed by any request
                    answer: dict[str, Any] = getattr(self._client, method)(Bucket=self._bucket, **arguments)
            except exceptions.ClientError as cause:
                status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
                refusal = cause.response["Error"]
                _raise_refused(what, status, str(refusal.get("Code")), str(refusal.get("Message")), cause)
            except (exceptions.BotoCoreError, OSError) as cause:
                transient_errors = exceptions.HTTPClientError | exceptions.ConnectionError | OSError
                _raise_unanswered(what, cause, transient=isinstance(cause, transient_errors))
            return answer

        return self._with_retries(what, attempt)

    # Bytes

    def _signed_url(self, method: str, arguments: dict[str, Any]) -> SplitResult:
        """Return the URL for a request by http.client, signed by botocore."""
        try:
            with quiet.ours():
                url: str = self._client.generate_presigned_url(
                    method, Params={"Bucket": self._bucket, **arguments}, ExpiresIn=URL_SECONDS
                )
        except self._botocore.exceptions.BotoCoreError as cause:
            # A provider of credentials may fail for a while; missing credentials stay missing.
            missing = isinstance(cause, self._botocore.exceptions.NoCredentialsError)
            _raise_unanswered(f"sign {method}", cause, transient=not missing)
        return urlsplit(url)

    def _connect(self, url: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection that is in use nowhere else, and whether it has been used before."""
        while True:
            with self._lock:
                netloc, connection = self._idle.pop() if self._idle else ("", None)
            if connection is None:
                break
            if netloc == url.netloc:
                connection.sock.settimeout(self.retry.stall_timeout_s)  # the policy may be another one now
                return connection, True
            connection.close()  # to an earlier endpoint
        host, port = url.hostname or "", url.port
        timeout_s = self.retry.connect_timeout_s
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        connection.connect()
        connection.sock.settimeout(self.retry.stall_timeout_s)
        return connection, False

    def _exchange(
        self,
        what: str,
        method: str,
        arguments: dict[str, Any],
        talk: Callable[[http.client.HTTPConnection, str, float], Result],
        nbytes: int,
    ) -> Result:
        """Make one attempt at a request: sign it, and call `talk(connection, target, deadline_s)`; return its result.

        Args:
            what: Names the request in errors.
            method: botocore's name for it.
            arguments: For that method.
            talk: Sends the request and reads the answer; closes the connection if it cannot be used again.
            nbytes: How much it transfers, for the deadline.
        """
        url = self._signed_url(method, arguments)
        target = f"{url.path or '/'}?{url.query}"
        while True:
            connection, was_used = None, False
            try:
                connection, was_used = self._connect(url)
                deadline_s = time.monotonic() + self.retry.stall_timeout_s + nbytes / LEAST_BYTES_PER_S
                result = talk(connection, target, deadline_s)
                if connection.sock is not None:  # else `talk` has closed it
                    with self._lock:
                        self._idle.append((url.netloc, connection))
                return result
            except (http.client.HTTPException, OSError) as cause:
                if connection is not None:
                    connection.close()
                is_closed = isinstance(cause, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError)
                was_closed_while_idle = was_used and is_closed
                # A server may close idle connections: then the loop tries again at once, with another connection.
                if not was_closed_while_idle:
                    _raise_unanswered(what, cause, transient=not isinstance(cause, ssl.SSLCertVerificationError))
            except BaseException:  # hang up: the server must not wait for the rest of a request
                if connection is not None:
                    connection.close()
                raise

    def _get(self, key: str, buffers: Sequence[memoryview]) -> int:
        """Get an object, in one attempt; return its size."""
        what = f"get {key}"
        room_bytes = sum(len(buffer) for buffer in buffers)

        def talk(connection: http.client.HTTPConnection, target: str, deadline_s: float) -> int:
            """Fill the buffers from the answer; return the object's size."""
            # "identity": the bytes as they are stored, so that their number is the object's size.
            connection.request("GET", target, headers={"Accept-Encoding": "identity"})
            answer = connection.getresponse()
            if answer.status != 200:
                _raise_for_answer(what, answer)
            size = answer.length
            if size is None:
                raise http.client.HTTPException("the answer does not say how long it is")
            left_bytes = size
            for buffer in buffers:
                done = 0
                while done < len(buffer) and left_bytes:
                    read_bytes = answer.readinto(buffer[done : min(done + PIECE_BYTES, len(buffer))])
                    if read_bytes == 0:
                        raise ConnectionResetError(errno.ECONNRESET, f"the answer ended {left_bytes} bytes early")
                    done += read_bytes
                    left_bytes -= read_bytes
                    _check_deadline(deadline_s)
            if size > room_bytes or answer.will_close:
                connection.close()  # instead of reading the rest of the object
            return size

        return self._exchange(what, "get_object", {"Key": key}, talk, room_bytes)

    def _send(
        self,
        method: str,
        arguments: dict[str, Any],
        buffers: Sequence[memoryview | FileBytes],
        headers: dict[str, str],
    ) -> str:
        """Send one object or part, in one attempt; return its ETag."""
        what = f"put {arguments['Key']}"
        nbytes = sum(len(buffer) for buffer in buffers)

        def talk(connection: http.client.HTTPConnection, target: str, deadline_s: float) -> str:
            """Send the buffers; return the ETag in the answer."""
            connection.putrequest("PUT", target, skip_accept_encoding=True)
            for name, value in {"Content-Length": str(nbytes), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
            try:
                for buffer in buffers:
                    for start in range(0, len(buffer), PIECE_BYTES):
                        connection.sock.sendall(buffer[start : start + PIECE_BYTES])
                        _check_deadline(deadline_s)
            except (BrokenPipeError, ConnectionResetError) as cause:
                # A server may answer with an error and hang up; the answer says more than the lost connection.
                try:
                    answer = connection.getresponse()
                except (http.client.HTTPException, OSError):
                    raise cause from None
                if answer.status < 300:  # no error, so the lost connection is all that is known
                    raise
                _raise_for_answer(what, answer)
            answer = connection.getresponse()
            if answer.status not in (200, 201, 204):
                _raise_for_answer(what, answer)
            answer.read()  # to its end, so that the connection can be used again
            if answer.will_close:
                connection.close()
            return answer.getheader("ETag", "")

        return self._exchange(what, method, arguments, talk, nbytes)

    def _put_parts(self, key: str, buffers: Sequence[memoryview | FileBytes], nbytes: int) -> None:
        """Upload an object of `nbytes` in parts; abort the upload if one fails."""
        upload_id = self._request(f"put {key}", "create_multipart_upload", Key=key)["UploadId"]
        try:
            parts = []
            for number, start in enumerate(range(0, nbytes, self._part_bytes), start=1):
                part = _byte_range(buffers, start, min(start + self._part_bytes, nbytes))
                arguments = {"Key": key, "UploadId": upload_id, "PartNumber": number}

                def attempt(arguments: dict[str, Any] = arguments, part: list[memoryview | FileBytes] = part) -> str:
                    """Send this part once; the defaults bind the loop's present values."""
                    return self._send("upload_part", arguments, part, {})

                parts.append({"PartNumber": number, "ETag": self._with_retries(f"put {key} part {number}", attempt)})
            whole = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
            try:
                self._request(f"put {key}", "complete_multipart_upload", **whole)
            except ObjectMissingError:
                # The upload does not exist any more if an attempt whose answer was lost has completed it.
                if self.head(key) != nbytes:
                    raise
        except BaseException:  # such as a file's that got shorter
            try:
                self._request(f"abort {key}", "abort_multipart_upload", Key=key, UploadId=upload_id)
            except ObjectError as error:  # parts that are left behind take room, but do no harm
                _log.warning("parts of an upload were left behind at %s: %s", self.endpoint, error)
            raise


def _byte_range(buffers: Sequence[memoryview | FileBytes], start: int, stop: int) -> list[memoryview | FileBytes]:
    """Return bytes `start` to `stop` of all `buffers` together, as parts of these, without copying."""
    pieces = []
    for buffer in buffers:
        if start < len(buffer) and stop > 0:
            first = max(start, 0)  # in this buffer; a `stop` beyond its end is cut to the end below
            pieces.append(buffer.part(first, stop) if isinstance(buffer, FileBytes) else buffer[first:stop])
        start -= len(buffer)  # from here on counted from the next buffer's start
        stop -= len(buffer)
    return pieces


def _check_deadline(deadline_s: float) -> None:
    """Raise TimeoutError once the time for a transfer is over; called after each piece of it."""
    if time.monotonic() > deadline_s:
        raise TimeoutError(errno.ETIMEDOUT, f"slower than {LEAST_BYTES_PER_S} bytes/s")


def _errno_of(status: int) -> int:
    """Return the system error that is most like an HTTP status."""
    return {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 507: errno.ENOSPC}.get(status, errno.EIO)


def _raise_for_answer(what: str, answer: http.client.HTTPResponse) -> NoReturn:
    """Raise the error for an HTTP answer that is not a success; its body names a code and a message."""
    body = answer.read(64 << 10)  # a longer body is left unread: after an error the connection is closed
    code = message = ""
    try:
        for element in ElementTree.fromstring(body).iter():
            name = element.tag.rpartition("}")[2]  # without the name space in braces
            if name == "Code":
                code = element.text or ""
            elif name == "Message":
                message = element.text or ""
    except ElementTree.ParseError:
        code = answer.reason
    _raise_refused(what, answer.status, code or str(answer.status), message, None)


def _raise_refused(what: str, status: int, code: str, message: str, cause: Exception | None) -> NoReturn:
    """Raise the error for a request that the store has refused; `cause` is botocore's error, if that has made it."""
    text = f"{what}: {status} {code}" + (f", {message}" if message else "")
    if advice := _ADVICE.get(code):
        text += f"; {advice}"
    if status == 412:  # a precondition has failed: the one of `create`, that there is no such object
        raise ObjectExistsError(text, code=code, status=status, errno=errno.EEXIST, transient=False) from cause
    if status == 404 and code != "NoSuchBucket":
        raise ObjectMissingError(text, code=code, status=status, errno=errno.ENOENT, transient=False) from cause
    transient = status in _TRANSIENT_STATUSES or status > 509 or code in _TRANSIENT_CODES
    raise ObjectError(text, code=code, status=status, errno=_errno_of(status), transient=transient) from cause


def _raise_unanswered(what: str, cause: Exception, *, transient: bool) -> NoReturn:
    """Raise the error for a request that got no answer.

    Its `errno` is that of `cause` if the system made it, else the most similar one.
    """
    code = getattr(cause, "errno", None)
    if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
        code = errno.ETIMEDOUT
    elif not isinstance(code, int) or code <= 0 or isinstance(cause, ssl.SSLError):  # no error number of the system's
        code = errno.ECONNRESET if isinstance(cause, http.client.HTTPException) else errno.EIO
    text = f"{what}: {type(cause).__name__}: {cause}"
    raise ObjectError(text, code=type(cause).__name__, errno=code, transient=transient) from cause
