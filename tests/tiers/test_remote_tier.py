"""The tier of an object store: its keys, its faults, its retries, and what a user is told."""

from __future__ import annotations

import builtins
import errno
import http.server
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from _throttled import ThrottledTier
from s3_server import BUCKET, FaultProxy, S3Server
from tier_harness import Harness, gather

from offload._native import CompletionQueue
from offload.errors import CheckpointError, ConfigError, CorruptRecordError, TierError
from offload.protocols import ERROR_CHECKSUM, ERROR_SHORT, TileId
from offload.tiers import (
    RemoteTier,
    RetryPolicy,
    S3Client,
    check_places,
    free_bytes,
    open_tier,
    slot_bytes,
    tier_error,
)
from offload.tiers import objects as objects_module
from offload.tiers.common import FileBytes

botocore_session = pytest.importorskip("botocore.session", reason="botocore is not installed")

TARGET = 4 << 20
NBYTES = 256 << 10
QUICK = RetryPolicy(attempts=4, first_delay_s=0.01, longest_delay_s=0.02, stall_timeout_s=10.0)
LASTING = RetryPolicy(attempts=10_000, first_delay_s=0.05, longest_delay_s=0.05, stall_timeout_s=10.0)

Open = Callable[..., Harness]


@pytest.fixture
def open_remote(s3: S3Server, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a tier on a prefix of its own: `open_remote(retry, ...)`; closed at the end."""
    opened: list[RemoteTier] = []
    prefix = f"test-{uuid.uuid4()}"

    def make(retry: RetryPolicy = QUICK, **options: object) -> Harness:
        queue = CompletionQueue()
        path = f"s3://{BUCKET}/{prefix}"
        tier = RemoteTier(path, uuid.uuid4(), queue, retry=retry, **gather(options))
        opened.append(tier)
        return Harness(tier, queue)

    yield make
    for tier in opened:
        tier.close()


def prefix_of(harness: Harness) -> str:
    assert isinstance(harness.tier, RemoteTier)
    return harness.tier.store_prefix


def tiles(server: S3Server, harness: Harness) -> list[str]:
    """Return the names of a store's objects, without the store's own record."""
    prefix = prefix_of(harness)
    return sorted(key.removeprefix(prefix) for key in server.keys(prefix) if not key.endswith("store.json"))


def become(server: S3Server, harness: Harness, expected: list[str]) -> None:
    """Wait until the old objects are gone, and no others."""
    until_s = time.monotonic() + 60.0
    while tiles(server, harness) != sorted(expected) and time.monotonic() < until_s:
        time.sleep(0.001)
    assert tiles(server, harness) == sorted(expected)


# Keys


def test_the_key_names_tile_version_and_slot(open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    offset = slot_bytes(NBYTES)
    assert harness.write(harness.request(offset, NBYTES, tile=TileId(4, 1, 2), step=9)).error == 0
    assert tiles(s3, harness) == [f"4-1-2-9-{offset}"]


def test_the_old_object_goes_when_its_slot_is_used_again(open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    pitch = slot_bytes(NBYTES)
    for step in range(1, 4):
        assert harness.write(harness.request((step % 2) * pitch, NBYTES, step=step)).error == 0
    become(s3, harness, [f"1-2-3-2-{0}", f"1-2-3-3-{pitch}"])


def test_writing_a_version_again_keeps_it(open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    for seed in range(5):
        data = harness.fill(NBYTES, seed)
        assert harness.write(harness.request(0, NBYTES)).error == 0
        assert harness.read(harness.request(0, NBYTES, at=TARGET)).error == 0
        assert harness.bytes_at(TARGET, NBYTES) == data
    assert tiles(s3, harness) == ["1-2-3-7-0"]


def test_a_slot_over_others_takes_their_place(open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    for index in range(4):
        assert harness.write(harness.request(index * slot_bytes(8192), 8192, tile=TileId(0, 0, index))).error == 0
    assert harness.write(harness.request(0, slot_bytes(8192) + 4096, tile=TileId(1, 0, 0))).error == 0
    become(s3, harness, ["1-0-0-7-0", *(f"0-0-{i}-7-{i * slot_bytes(8192)}" for i in (2, 3))])


def test_close_leaves_only_what_others_have_put_there(open_remote: Open, s3: S3Server) -> None:
    first, second = open_remote(), open_remote()
    for harness in (first, second):
        harness.fill(NBYTES)
        assert harness.write(harness.request(0, NBYTES)).error == 0
    first.tier.close()
    assert s3.keys(prefix_of(first)) == []
    assert tiles(s3, second) == ["1-2-3-7-0"]


def test_objects_above_a_size_go_in_parts(s3: S3Server) -> None:
    client = S3Client(f"s3://{BUCKET}", BUCKET, retry=QUICK, multipart_bytes=6 << 20, part_bytes=5 << 20)
    content = os.urandom(11 << 20)
    halves = [memoryview(content)[:5000], memoryview(content)[5000:]]
    client.put("parts/one", halves)
    found = [memoryview(bytearray(1 << 20)), memoryview(bytearray(10 << 20))]
    assert client.get_into("parts/one", found) == len(content)
    assert b"".join(found) == content
    client.delete(["parts/one", "parts/never"])
    assert client.head("parts/one") is None
    client.close()


def test_botocore_is_quiet_at_info_for_our_clients_alone(
    s3: S3Server, open_remote: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    harness = open_remote()
    harness.fill(NBYTES)
    assert harness.write(harness.request(0, NBYTES)).error == 0
    client = S3Client(f"s3://{BUCKET}", BUCKET, retry=QUICK)
    client.list("nothing/")
    client.close()

    def theirs() -> list[str]:
        return [record.name for record in caplog.records if record.name.startswith("botocore")]

    assert theirs() == []
    botocore_session.get_session().create_client("s3").close()  # somebody else's, on this thread
    assert "botocore.credentials" in theirs()
    with objects_module.quiet.ours():
        logging.getLogger("botocore.credentials").info("not said")
        logging.getLogger("botocore.credentials").warning("said")
        other = threading.Thread(target=logging.getLogger("botocore.credentials").info, args=("said, too",))
        other.start()
        other.join()
    said = [record.getMessage() for record in caplog.records if record.name == "botocore.credentials"]
    assert said[-2:] == ["said", "said, too"]


@pytest.mark.parametrize(
    ("why", "error", "file_bytes"),
    [("500", objects_module.ObjectError, 7 << 20), ("it became shorter", CheckpointError, 6 << 20)],
)
def test_an_upload_in_parts_that_fails_leaves_nothing(
    s3: S3Server, proxy: FaultProxy, why: str, error: type[Exception], file_bytes: int
) -> None:
    client = S3Client(f"s3://{BUCKET}", BUCKET, retry=QUICK, multipart_bytes=6 << 20, part_bytes=5 << 20)
    if why == "500":
        proxy.add(kind="status", method="PUT", match="partNumber=2", times=99)
    with tempfile.TemporaryFile() as file:
        file.truncate(file_bytes)
        with pytest.raises(error, match=why):
            client.put("parts/two", [FileBytes(file.fileno(), 7 << 20)])
    client.close()
    assert b"<Upload>" not in s3.request("GET", f"/{BUCKET}?uploads")
    assert s3.keys("parts/") == []


def test_as_many_threads_as_requests_in_flight(open_remote: Open) -> None:
    harness = open_remote(depth=2)
    for depth in (5, 1):
        harness.tier.set_depth(depth)
        names = [thread.name.rpartition("-")[0] for thread in threading.enumerate()]
        assert (names.count("offload-get"), names.count("offload-put")) == (depth, depth)


def test_an_upload_in_parts_whose_last_answer_is_lost_is_there(s3: S3Server, proxy: FaultProxy) -> None:
    client = S3Client(f"s3://{BUCKET}", BUCKET, retry=QUICK, multipart_bytes=6 << 20, part_bytes=5 << 20)
    content = os.urandom(7 << 20)
    lost = proxy.add(kind="lost-answer", method="POST", match="uploadId=")
    client.put("parts/three", [memoryview(content)])
    assert lost.hits == 1
    found = memoryview(bytearray(len(content)))
    assert client.get_into("parts/three", [found]) == len(content)
    assert found == content
    # But one that has gone without leaving the object is an error.
    proxy.add(kind="status", method="POST", match="uploadId=", status=404, code="NoSuchUpload")
    with pytest.raises(objects_module.ObjectMissingError, match="NoSuchUpload"):
        client.put("parts/four", [memoryview(content)])
    assert s3.keys("parts/") == ["parts/three"]
    client.delete(["parts/three"])
    client.close()


# Faults that pass


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "times": 3},
        {"kind": "status", "status": 503, "code": "SlowDown", "times": 3},
        {"kind": "status", "status": 429, "code": "TooManyRequests"},
        {"kind": "reset", "times": 3},
        {"kind": "stall"},
        {"kind": "slow"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_faults_that_pass_are_ridden_out(
    proxy: FaultProxy, open_remote: Open, fault: dict[str, object], method: str
) -> None:
    stall_s = 1.0 if fault["kind"] in ("stall", "slow") else 10.0
    harness = open_remote(RetryPolicy(attempts=6, first_delay_s=0.01, longest_delay_s=0.02, stall_timeout_s=stall_s))
    data = harness.fill(NBYTES)
    planted = proxy.add(method=method, match="/1-2-3-", **fault)
    written = harness.write(harness.request(0, NBYTES))
    assert written.error == 0
    assert harness.read(harness.request(0, NBYTES, at=TARGET, checksum=written.detail)).error == 0
    assert harness.bytes_at(TARGET, NBYTES) == data
    assert planted.hits == planted.times


@pytest.mark.parametrize("kind", ["truncate", "corrupt"])
def test_an_answer_that_arrives_damaged_is_fetched_again(proxy: FaultProxy, open_remote: Open, kind: str) -> None:
    harness = open_remote()
    data = harness.fill(NBYTES)
    planted = proxy.add(kind=kind, match="/1-2-3-")
    assert harness.write(harness.request(0, NBYTES)).error == 0
    assert harness.read(harness.request(0, NBYTES, at=TARGET)).error == 0
    assert harness.bytes_at(TARGET, NBYTES) == data
    assert planted.hits == 1


def test_a_write_whose_answer_is_lost_is_repeated(proxy: FaultProxy, open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    proxy.add(kind="lost-answer", method="PUT", match="/1-2-3-")
    assert harness.write(harness.request(0, NBYTES)).error == 0
    assert harness.read(harness.request(0, NBYTES, at=TARGET)).error == 0
    assert tiles(s3, harness) == ["1-2-3-7-0"]


# Faults that stay


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_server_that_stays_out_of_order_is_an_error_that_says_so(
    proxy: FaultProxy, open_remote: Open, method: str
) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    if method == "GET":
        assert harness.write(harness.request(0, NBYTES)).error == 0
    planted = proxy.add(kind="status", method=method, match="/1-2-3-", status=503, code="SlowDown", times=99)
    request = harness.request(0, NBYTES)
    completion = harness.read(request) if method == "GET" else harness.write(request)
    assert completion.error == errno.EIO
    assert planted.hits == QUICK.attempts
    error = tier_error("read", completion, request, harness.tier)
    assert type(error) is TierError
    for words in ("503 SlowDown", "s3://", "subgroup 1, tensor 2, tile 3", "EIO"):
        assert words in str(error)


def test_each_kind_of_fault_has_its_errno(proxy: FaultProxy, open_remote: Open) -> None:
    for fault, code in (
        ({"kind": "reset"}, errno.ECONNRESET),
        ({"kind": "stall"}, errno.ETIMEDOUT),
        ({"kind": "status", "status": 403, "code": "AccessDenied"}, errno.EACCES),
        ({"kind": "status", "status": 404, "code": "NoSuchBucket"}, errno.ENOENT),
        ({"kind": "status", "status": 507, "code": "InsufficientStorage"}, errno.ENOSPC),
    ):
        stall_s = 0.3 if fault["kind"] == "stall" else 10.0
        patience = RetryPolicy(attempts=2, first_delay_s=0.01, longest_delay_s=0.02, stall_timeout_s=stall_s)
        harness = open_remote(patience)
        harness.fill(NBYTES)
        planted = proxy.add(method="PUT", match="/1-2-3-", times=99, **fault)
        assert harness.write(harness.request(0, NBYTES)).error == code, fault
        proxy.faults.remove(planted)


def test_what_arrives_damaged_every_time_is_reported(proxy: FaultProxy, open_remote: Open) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    assert harness.write(harness.request(0, NBYTES)).error == 0
    proxy.add(kind="corrupt", match="/1-2-3-", times=99)
    request = harness.request(0, NBYTES, at=TARGET)
    completion = harness.read(request)
    assert completion.error == ERROR_CHECKSUM
    assert isinstance(tier_error("read", completion, request, harness.tier), CorruptRecordError)


def test_a_failed_write_leaves_the_version_before(proxy: FaultProxy, open_remote: Open, s3: S3Server) -> None:
    harness = open_remote()
    data = harness.fill(NBYTES, seed=1)
    assert harness.write(harness.request(0, NBYTES, step=1)).error == 0
    proxy.add(kind="lost-answer", method="PUT", match="/1-2-3-2-", times=99)
    harness.fill(NBYTES, seed=2)
    assert harness.write(harness.request(0, NBYTES, step=2)).error == errno.ECONNRESET
    assert harness.read(harness.request(0, NBYTES, at=TARGET, step=1)).error == 0
    assert harness.bytes_at(TARGET, NBYTES) == data
    become(s3, harness, ["1-2-3-1-0"])


def test_deleting_that_fails_is_made_up_for_at_the_end(
    proxy: FaultProxy, open_remote: Open, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    proxy.add(kind="status", method="POST", match="delete", times=QUICK.attempts)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            assert harness.write(harness.request(0, NBYTES, step=step)).error == 0
        until_s = time.monotonic() + 60.0
        while "1 old objects stay until the end" not in caplog.text and time.monotonic() < until_s:
            time.sleep(0.001)
    assert "1 old objects stay until the end" in caplog.text
    assert tiles(s3, harness) == ["1-2-3-1-0", "1-2-3-2-0"]
    harness.tier.close()
    assert s3.keys(prefix_of(harness)) == []


def test_a_server_that_was_killed_and_started_again(
    aws: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, s3: S3Server
) -> None:
    servers = [S3Server()]
    proxy = FaultProxy(servers[0].port)
    aws.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    try:
        queue = CompletionQueue()
        harness = Harness(RemoteTier(f"s3://{BUCKET}/run", uuid.uuid4(), queue, retry=LASTING), queue)
        data = harness.fill(NBYTES)
        pitch = slot_bytes(NBYTES)
        assert harness.write(harness.request(0, NBYTES)).error == 0
        servers[0].kill()
        survivor = harness.request(pitch, NBYTES)
        harness.tier.write(survivor)  # is refused until there is a server again
        servers.append(S3Server())
        proxy.upstream = servers[1].port
        assert harness.collect(1)[0].error == 0
        # The new server does not have what the old one had.
        lost = harness.request(0, NBYTES, at=TARGET)
        completion = harness.read(lost)
        assert completion.error == ERROR_SHORT
        error = tier_error("read", completion, lost, harness.tier)
        assert isinstance(error, CorruptRecordError)
        assert "NoSuchKey" in str(error)
        assert harness.read(harness.request(pitch, NBYTES, at=TARGET)).error == 0
        assert harness.bytes_at(TARGET, NBYTES) == data
        servers[1].kill()
        with caplog.at_level(logging.WARNING):
            harness.tier.close()  # ends, though nothing can be deleted
        assert "left 3 objects in place" in caplog.text
    finally:
        proxy.close()
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_close_asks_a_silent_server_once(
    proxy: FaultProxy, open_remote: Open, s3: S3Server, aws: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aws.setattr("offload.tiers.remote.HASTY", RetryPolicy(attempts=2, first_delay_s=0.01, stall_timeout_s=2.0))
    harness = open_remote()
    harness.fill(NBYTES)
    assert harness.write(harness.request(0, NBYTES)).error == 0
    before = len(proxy.requests)
    for method in ("GET", "POST"):
        proxy.add(kind="stall", method=method, times=99)
    with caplog.at_level(logging.WARNING):
        harness.tier.close()
    assert [method for method, _ in proxy.requests[before:]] == ["GET"] * 2  # the listing, tried twice; no deleting
    assert "left 2 objects in place" in caplog.text
    assert len(s3.keys(prefix_of(harness))) == 2


def test_a_bucket_that_may_not_be_listed_is_cleaned_all_the_same(
    proxy: FaultProxy, open_remote: Open, s3: S3Server
) -> None:
    harness = open_remote()
    harness.fill(NBYTES)
    assert harness.write(harness.request(0, NBYTES)).error == 0
    refused = proxy.add(kind="status", match="list-type", status=403, code="AccessDenied", times=99)
    harness.tier.close()
    assert refused.hits == 1
    assert s3.keys(prefix_of(harness)) == []


def test_a_throttled_store_says_what_the_server_said(
    proxy: FaultProxy, s3: S3Server, aws: pytest.MonkeyPatch
) -> None:
    inner_queue, queue = CompletionQueue(), CompletionQueue()
    inner = RemoteTier(f"s3://{BUCKET}/throttled", uuid.uuid4(), inner_queue, retry=QUICK)
    tier = ThrottledTier(inner, inner_queue, queue, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    harness = Harness(tier, queue)
    proxy.add(kind="status", method="PUT", match="/1-2-3-", status=403, code="AccessDenied", times=99)
    request = harness.request(0, NBYTES)
    assert "403 AccessDenied" in str(tier_error("write", harness.write(request), request, tier))
    tier.close()


# Bad input


def refused(path: str) -> str:
    """Open a tier that cannot be opened; return what a user is told."""
    with pytest.raises(ConfigError) as caught:
        open_tier(path, uuid.uuid4(), CompletionQueue())
    assert path in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", ["s3://", "s3:///x", "s3://a/x", "s3://bad bucket/x"])
def test_names_that_are_no_bucket(aws: pytest.MonkeyPatch, path: str) -> None:
    assert "s3://bucket/prefix" in refused(path)
    with pytest.raises(ConfigError, match=r"paths\[0\]"):
        check_places([path])


def test_paths_are_looked_at_before_anything_is_opened(aws: pytest.MonkeyPatch) -> None:
    check_places(["s3://bucket/a", "s3://bucket/b", "s3://other-bucket"])
    with pytest.raises(ConfigError, match="same place"):
        check_places(["s3://bucket/a", "s3://bucket/a/"])
    assert free_bytes(["s3://bucket/a"])[0] > 1 << 50


def test_an_endpoint_nobody_listens_at(aws: pytest.MonkeyPatch) -> None:
    aws.setattr(objects_module, "HASTY", QUICK)
    with socket.socket() as bound:  # and not listening: nobody else has this port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        aws.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        said = refused(f"s3://{BUCKET}/run")
    assert f"http://127.0.0.1:{port} cannot be reached" in said
    assert "AWS_ENDPOINT_URL" in said


def test_an_endpoint_that_is_no_url(aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ENDPOINT_URL", "not a url")
    assert "settings" in refused(f"s3://{BUCKET}/run")


def test_an_endpoint_that_never_answers(proxy: FaultProxy, aws: pytest.MonkeyPatch) -> None:
    hasty = RetryPolicy(attempts=2, first_delay_s=0.01, stall_timeout_s=0.2)
    aws.setattr("offload.tiers.remote.HASTY", hasty)
    proxy.add(kind="stall", method="PUT", times=99)
    assert "cannot be reached" in refused(f"s3://{BUCKET}/run")


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    said = refused("s3://another-bucket/run")
    assert "NoSuchBucket" in said
    assert s3.endpoint in said


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "policy"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", "renew them"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
        (503, "SlowDown", "try again later"),
    ],
)
@pytest.mark.parametrize("step", ["store.json", "trial"])
def test_a_bucket_that_refuses(
    proxy: FaultProxy, aws: pytest.MonkeyPatch, s3: S3Server, status: int, code: str, words: str, step: str
) -> None:
    aws.setattr("offload.tiers.remote.HASTY", QUICK)
    proxy.add(kind="status", method="PUT", match=step, status=status, code=code, times=99)
    said = refused(f"s3://{BUCKET}/refused")
    assert f"{status} {code}" in said
    assert words in said
    assert proxy.endpoint in said
    assert s3.keys("refused/") == []


def test_a_bucket_that_may_not_be_deleted_from(proxy: FaultProxy) -> None:
    proxy.add(kind="status", method="POST", match="delete", status=403, code="AccessDenied")
    assert "delete" in refused(f"s3://{BUCKET}/refused")


def test_a_server_that_looks_at_credentials(aws: pytest.MonkeyPatch) -> None:
    server = S3Server(free_requests=4)
    aws.setenv("AWS_ENDPOINT_URL", server.endpoint)
    try:
        iam = botocore_session.get_session().create_client("iam")
        iam.create_user(UserName="reader")
        allowed = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
        key = iam.create_access_key(UserName="reader")["AccessKey"]
        known, secret = key["AccessKeyId"], key["SecretAccessKey"]
        for name, password, words in [
            (known, secret, ["AccessDenied", "put, get, list and delete"]),
            (known, "wrong", ["SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"]),
            ("AKIA0000000000000000", secret, ["InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"]),
        ]:
            aws.setenv("AWS_ACCESS_KEY_ID", name)
            aws.setenv("AWS_SECRET_ACCESS_KEY", password)
            said = refused(f"s3://{BUCKET}/run")
            for word in ["403", server.endpoint, *words]:
                assert word in said
    finally:
        server.kill()


def test_a_server_that_is_no_object_store(aws: pytest.MonkeyPatch) -> None:
    aws.setattr("offload.tiers.remote.HASTY", QUICK)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        aws.setenv("AWS_ENDPOINT_URL", endpoint)
        said = refused(f"s3://{BUCKET}/run")
        assert f"{endpoint} answers" in said
        assert "501" in said
        assert "check AWS_ENDPOINT_URL" in said
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_missing_credentials(s3: S3Server, aws: pytest.MonkeyPatch) -> None:
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.delenv("AWS_SECRET_ACCESS_KEY")
    said = refused(f"s3://{BUCKET}/run")
    assert "AWS_ACCESS_KEY_ID" in said
    assert s3.endpoint in said


def test_a_profile_that_is_not_there(s3: S3Server, aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in refused(f"s3://{BUCKET}/run")


def test_a_missing_client_is_named_with_its_remedy(aws: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object, **more: object) -> object:
        if name.startswith("botocore"):
            raise ImportError(name)
        return real(name, *arguments, **more)  # type: ignore[arg-type]

    aws.setattr(builtins, "__import__", without)
    for use in (lambda: refused("s3://bucket/run"), lambda: check_places(["s3://bucket/run"])):
        try:
            said = use() or ""
        except ConfigError as error:
            said = str(error)
        assert "pip install 'offload[s3]'" in said
