"""An S3 server process on loopback, and a proxy before it that breaks what a test tells it to break."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

BUCKET = "bucket"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}
UNSET = ["AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"]


class S3Server:
    """moto's server in a process of its own, with one empty bucket; objects end with the process.

    Args:
        free_requests: How many requests it obeys, that for the bucket included, before it looks at who asks; None for
            all.
    """

    def __init__(self, free_requests: int | None = None) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        settings = dict(os.environ)
        if free_requests is not None:
            settings["INITIAL_NO_AUTH_ACTION_COUNT"] = str(free_requests)
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=settings
        )
        assert self.process.stderr is not None
        # The line comes once the socket listens; the log behind it is read so that the pipe never fills.
        for line in self.process.stderr:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        else:
            raise RuntimeError("moto's server did not start")
        self._drain = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._drain.start()
        self.request("PUT", f"/{BUCKET}")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, target: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status < 300, (answer.status, body)
        return body

    def keys(self, prefix: str = "") -> list[str]:
        body = self.request("GET", f"/{BUCKET}?list-type=2&prefix={prefix}").decode()
        return re.findall(r"<Key>([^<]*)</Key>", body)

    def kill(self) -> None:
        """End it as a power cut does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._drain.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


@dataclasses.dataclass
class HttpFault:
    """What happens to some requests.

    `status` answers with `status` and `code` without asking the server; `stall` never answers; `slow` sends the
    answer in pieces with pauses; `truncate` ends it half-way; `corrupt` changes its last byte; `reset` resets the
    connection once the request has come; `lost-answer` resets it after the server has done what was asked.
    """

    kind: Literal["status", "stall", "slow", "truncate", "corrupt", "reset", "lost-answer"]
    method: str = "GET"
    match: str = ""
    after: int = 0
    times: int = 1
    status: int = 500
    code: str = "InternalError"
    hits: int = 0


class FaultProxy:
    """Forwards HTTP requests to `upstream` (a port) on loopback, apart from `faults`.

    Attributes:
        upstream: Port of the server.
        faults: Looked at in order; the first that matches a request and is not used up is applied.
        before: Called with method and target of every request before anything else.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: list[HttpFault] = []
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, target: None
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                proxy._forward(self)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = False  # its end waits for them

            def process_request(self, request: Any, address: Any) -> None:
                proxy._connections.append(request)
                super().process_request(request, address)

            def handle_error(self, *arguments: object) -> None:
                pass  # clients hang up on stalled answers

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def add(self, **fault: object) -> HttpFault:
        """Apply one more fault from now on."""
        made = HttpFault(**fault)  # type: ignore[arg-type]
        with self._lock:
            self.faults.append(made)
        return made

    def close(self) -> None:
        """End all threads, those of clients that keep their connections included: nothing is left to end later."""
        self.released.set()
        self._server.shutdown()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has been closed
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def _fault(self, method: str, target: str) -> HttpFault | None:
        with self._lock:
            self.requests.append((method, target))
            for fault in self.faults:
                if fault.method == method and re.search(fault.match, target):
                    if fault.after:
                        fault.after -= 1
                    elif fault.hits < fault.times:
                        fault.hits += 1
                        return fault
        return None

    def _forward(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        method, target = handler.command, handler.path
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.before(method, target)
        fault = self._fault(method, target)
        if fault is not None and fault.kind == "stall":
            self.released.wait()
            handler.close_connection = True
            return
        if fault is not None and fault.kind == "reset":
            _reset(handler)
            return
        if fault is not None and fault.kind == "status":
            content = f"<Error><Code>{fault.code}</Code><Message>as told</Message></Error>".encode()
            self._answer(handler, fault.status, {"Content-Type": "application/xml"}, content)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            upstream.request(method, target, body, dict(handler.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
        except (http.client.HTTPException, OSError):
            _reset(handler)
            return
        finally:
            upstream.close()
        if fault is not None and fault.kind == "lost-answer":
            _reset(handler)
            return
        if fault is not None and fault.kind == "corrupt":
            content = content[:-1] + bytes([content[-1] ^ 1])
        skipped = ("content-length", "transfer-encoding", "connection")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in skipped}
        if method == "HEAD":
            headers["Content-Length"] = answer.getheader("Content-Length", "0")
        self._answer(handler, answer.status, headers, content, fault)

    def _answer(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        fault: HttpFault | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if "Content-Length" not in headers:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if fault is not None and fault.kind == "truncate":
            handler.wfile.write(content[: len(content) // 2])
            handler.close_connection = True
        elif fault is not None and fault.kind == "slow":
            for start in range(0, len(content), max(1, len(content) // 5)):
                handler.wfile.write(content[start : start + max(1, len(content) // 5)])
                handler.wfile.flush()
                self.released.wait(0.1)
        else:
            handler.wfile.write(content)
        handler.wfile.flush()


def _reset(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True
