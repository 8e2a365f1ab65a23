"""A headless Chromium, driven by its own debugging protocol; from Debian's package, no driver needed."""

import base64
import json
import shutil
import subprocess
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from .server import STOP_S, until

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")


class Browser:
    """One browser with one page. A context manager; skips the test where there is no Chromium.

    Attributes:
        faults: what the page's console has said of errors.
    """

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("there is no Chromium here")
        self.faults: list[str] = []
        self._ids = count(1)
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._resources = ExitStack()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = profile / "DevToolsActivePort"
            until(lambda: port_file.exists() and port_file.read_text(), "the browser listens", 60)
            port = port_file.read_text().split()[0]
            pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json()
            (page,) = (each for each in pages if each["type"] == "page")
            self._connection: ClientConnection = self._resources.enter_context(
                connect(page["webSocketDebuggerUrl"], max_size=None)
            )
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._resources.close()
        self._process.terminate()
        self._process.wait(STOP_S)

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("method") == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(message["params"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.faults.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, url: str) -> None:
        """Go to a page; its script has run when this returns."""
        self.call("Page.navigate", url=url)
        until(lambda: self.run("document.readyState") == "complete", f"{url} is loaded")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def type(self, text: str) -> None:
        """Type into what has the focus, and press Enter."""
        self.call("Input.insertText", text=text)
        self.press("Enter", 13, "\r")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Be so large, light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
