"""HTTP servers on loopback for tests: any, and one that gives the answers of a test and records the requests."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

Answer = tuple[int, Any]
"""Status and body; a body that is not bytes is sent as JSON."""


class LoopbackServer(ThreadingHTTPServer):
    """Serves on a free port in a thread of its own while its context is open."""

    daemon_threads = True

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = Thread(target=self.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class FakeServer(LoopbackServer):
    """A context manager.

    Attributes:
        answers: by method and path; other requests get `default`.
        asked: method, path and `Authorization` of each request.
        bodies: the JSON bodies of requests.
        redirect: an address to which all requests are redirected.
    """

    def __init__(self, default: Answer = (404, b"")) -> None:
        super().__init__(_Handler)
        self.default = default
        self.answers: dict[tuple[str, str], Answer] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.bodies: list[Any] = []
        self.redirect = ""


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        server = self.server
        server.asked.append((self.command, self.path, self.headers["Authorization"]))
        if length := int(self.headers["Content-Length"] or 0):
            server.bodies.append(json.loads(self.rfile.read(length)))
        status, body = server.answers.get((self.command, self.path), server.default)
        self.send_response(307 if server.redirect else status)
        if server.redirect:
            self.send_header("Location", f"{server.redirect}{self.path}")
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...
