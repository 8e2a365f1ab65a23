"""A head that streams the data of a test over HTTP, for tests of the page and the terminal."""

import select
import threading
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any

from tests.fakes.http_server import LoopbackServer
from vllm_omni_plugin.admin.watch.server_sent import MEDIA_TYPE, message

_PAGE = {"/omni": ("page.html", "text/html"), "/omni/page.js": ("page.js", "text/javascript")}
_PAGE["/omni/page.css"] = ("page.css", "text/css")

REPLICA: dict[str, Any] = {
    "id": "0.1",
    "status": "draining",
    "cordons": ["admin"],
    "remote": True,
    "address": "tcp://10.0.0.1:7001",
    "requests": 3,
    "others": 0,
    "waiting": 1,
    "tokens": 480,
    "kv_tokens": 4096,
    "kv_usage": 0.5,
    "tokens_per_second": 99.7,
    "hit_rate": None,
    "heartbeat_seconds": 0.25,
    "since_seconds": 61.0,
    "restarts": 0,
    "assigned": 9,
}
STAGE: dict[str, Any] = {"stage": 0, "policy": "prefix", "name": "", "level": 0, "inputs": [], "output": ""}
STATE: dict[str, Any] = {
    "time": 1000.0,
    "head": {"name": "host", "vllm": "0", "plugin": "0", "state": "up", "coordinator": False, "others": ["b"]},
    "requests": {
        "unfinished": 3,
        "queued": 0,
        "held_http": 1,
        "held_fleet": 0,
        "held_move": 1,
        "held_paused": 0,
        "moved": 5,
        "lost": 0,
        "refused": 2,
    },
    "stages": [{**STAGE, "replicas": [REPLICA]}],
    "sample": None,
}


def history() -> bytes:
    return message("history", [])


def state(**changes: Any) -> bytes:
    return message("state", {**STATE, "stages": [{**STAGE, "replicas": [{**REPLICA, **changes}]}]})


def event(event_id: str, reason: str = "it died") -> bytes:
    lost = {"time": 0, "kind": "lost", "stage": 0, "replica": "0.1", "reason": reason, "requests": 3}
    return message("lost", {"id": event_id, **lost}, event_id)


class StreamingHead(LoopbackServer):
    """Serves the page, and one stream after the other; the last stream stays open without data. A context manager.

    Args:
        streams: the data of each stream, in the order of the requests.
        silent: whether all streams stay open without data.

    Attributes:
        asked: the `Last-Event-ID` of each request.
        viewers: number of open streams.
    """

    def __init__(self, *streams: bytes, silent: bool = False) -> None:
        super().__init__(_Handler)
        self._streams = list(streams)
        self._silent = silent
        self._over = threading.Event()
        self._counting = threading.Lock()
        self.asked: list[str] = []
        self.viewers = 0

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()

    def handle_error(self, *_: object) -> None:
        """Viewers disconnect."""

    def serve(self, viewer: BaseHTTPRequestHandler) -> None:
        with self._counting:
            stream = self._streams[min(len(self.asked), len(self._streams) - 1)]
            self.asked.append(viewer.headers.get("Last-Event-ID", ""))
            stays = self._silent or len(self.asked) >= len(self._streams)
            self.viewers += 1
        try:
            viewer.wfile.write(stream)
            while stays and not self._over.is_set():
                readable, _, _ = select.select([viewer.connection], [], [], 0.02)
                if readable and not viewer.connection.recv(1):
                    break
        finally:
            with self._counting:
                self.viewers -= 1


class _Handler(BaseHTTPRequestHandler):
    server: StreamingHead

    def do_GET(self) -> None:
        name, media_type = _PAGE.get(self.path, ("", MEDIA_TYPE))
        # Browsers ask for an icon, too.
        self.send_response(200 if name or self.path == "/omni/fleet" else 204)
        self.send_header("Content-Type", media_type)
        self.end_headers()
        if name:
            self.wfile.write(files("vllm_omni_plugin.admin.watch").joinpath(name).read_bytes())
        elif self.path == "/omni/fleet":
            self.server.serve(self)

    def log_message(self, *_: Any) -> None:
        return None
