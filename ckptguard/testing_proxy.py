"""A small proxy before an S3 server that makes the faults of networks and servers: for tests."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>made to fail</Message><Resource>x</Resource><RequestId>1</RequestId></Error>"""


@dataclass(slots=True)
class Fault:
    """What happens to requests whose path holds `key` and whose method is `method`, `times` times (then no more).

    `kind`: status (answered with `status` and `code`), reset (the connection breaks after `after` bytes of the body),
    cut (the body ends there and the connection is closed), length (the stated length is `after` bytes too large), flip
    (the body's byte `after` is changed), stall (nothing comes for `seconds` after `after` bytes), stale (the answer that
    was given first is given again).
    """

    kind: str
    key: str = ""
    method: str = "GET"
    times: int = 1
    after: int = 0
    seconds: float = 0.0
    status: int = 500
    code: str = "InternalError"


class FaultProxy:
    """Stands before `port` of this machine. `faults` may be changed at any time; `seen` lists what came through, and `before` is
    called with method and path before a request is passed on; `refuse` may answer with a status and an error code."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, Mapping[str, str]]] = []
        self.bytes_down = 0
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.refuse: Callable[[str, str, Mapping[str, str]], tuple[int, str] | None] = lambda m, p, h: None
        self.lock = threading.Lock()
        self.remembered: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, method: str, path: str) -> Fault | None:
        """The fault for this request, counted down."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.key in path:
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that a test breaks are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        proxy, path = self.server.proxy, unquote(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with proxy.lock:
            proxy.seen.append((self.command, path, dict(self.headers)))
        proxy.before(self.command, path)
        fault = proxy.take(self.command, path)
        refused = proxy.refuse(self.command, path, dict(self.headers))
        if refused is not None:
            fault = Fault("status", status=refused[0], code=refused[1])
        if fault is not None and fault.kind == "status":
            text = ERROR.format(code=fault.code).encode()
            self._answer(fault.status, [("Content-Type", "application/xml")], text, None)
            return
        if fault is not None and fault.kind == "stale" and path in proxy.remembered:
            status, headers, data = proxy.remembered[path]
            self._answer(status, headers, data, None)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = b"" if self.command == "HEAD" else answer.read()
            headers = [
                (n, v)
                for n, v in answer.getheaders()
                if n.lower() not in ("transfer-encoding", "connection")
                and (self.command == "HEAD" or n.lower() != "content-length")
            ]
        except OSError:
            self._break()
            return
        finally:
            upstream.close()
        if "list-type" in path:
            proxy.remembered.setdefault(path, (answer.status, headers, data))
        self._answer(answer.status, headers, data, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header(
                "Content-Length", str(len(data) + (fault.after if fault and kind == "length" else 0))
            )
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and kind == "flip" and fault.after < len(data):
            data = data[: fault.after] + bytes([data[fault.after] ^ 1]) + data[fault.after + 1 :]
        if fault and kind in ("reset", "cut", "stall"):
            self.wfile.write(data[: fault.after])
            self.wfile.flush()
            if kind == "stall":
                time.sleep(fault.seconds)
            self._break(reset=kind == "reset")
            return
        self.wfile.write(data)
        with self.server.proxy.lock:
            self.server.proxy.bytes_down += len(data)
        if kind == "length":
            self._break()

    def _break(self, reset: bool = False) -> None:
        """End the connection; with a reset the other side is told so rudely."""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
