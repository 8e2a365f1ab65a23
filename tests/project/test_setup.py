"""`make setup` beside whatever `.venv` is there already, with interpreters that only pretend."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .source_tree import ROOT

NEEDED = (
    ".ci/setup",
    ".ci/setup-newer",
    ".ci/front_end.py",
    "pyproject.toml",
    "examples/cpu/requirements.txt",
    "examples/cpu/test-requirements.txt",
    "examples/cpu/vllm-alias/pyproject.toml",
    "examples/cpu/vllm-0.33/source.txt",
    "examples/cpu/vllm-0.33/build.txt",
    "examples/cpu/vllm-0.33/front-end.txt",
    "examples/cpu/vllm-0.33/requirements.txt",
)
INTERPRETER = """\
#!/usr/bin/env bash
case "$*" in
"-c "*) echo "{answer}" ;;
-V) echo "Python {version}" ;;
"-m venv "*)
    folder=${{@: -1}}
    mkdir -p "$folder/bin" "$folder/lib/python{version}/site-packages/vllm"
    cp "$0" "$folder/bin/python"
    echo "$PWD/$folder" >"$folder/bin/activate"
    touch "$folder/bin/vllm-omni-plugin"
    ;;
"-m pip "*" wheel "*)
    until [[ $1 == -w ]]; do shift; done
    mkdir "$2"
    touch "$2/vllm.whl"
    echo "$2" >built-in
    [[ ! -e interrupt ]] || kill -TERM 0
    ;;
".ci/front_end.py "*)
    echo "echo vllm-rs $(cat of-version 2>/dev/null || echo 0.33.0)" >"$3"
    chmod +x "$3"
    echo taken >>taken
    ;;
"-m pip "*) [[ $3 == --version || -z "{no_packages}" ]] ;;
esac
"""


class Folder:
    """A copy of the project's set-up in a path with spaces, and interpreters for it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "with some spaces"
        self.cache = folder / "cache"
        self._path = folder / "bin of mine"
        self._path.mkdir()
        for name in NEEDED:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.default = self.interpreter("python3.11", "3.11")

    def interpreter(self, name: str, version: str, path: Path | None = None, no_packages: str = "") -> Path:
        """Make one of this version; one below 3.11 answers the set-up's question for it with nothing."""
        path = path or self._path / name
        answer = version if tuple(map(int, version.split("."))) >= (3, 11) else ""
        path.write_text(INTERPRETER.format(version=version, answer=answer, no_packages=no_packages))
        path.chmod(0o755)
        return path

    def set_up(self, python: Path | None = None, vllm: str = "") -> "subprocess.CompletedProcess[str]":
        own = {
            "PATH": f"{self._path}:{os.environ['PATH']}",
            "PYTHON": str(python or ""),
            "VLLM": vllm,
            "XDG_CACHE_HOME": str(self.cache),
        }
        return subprocess.run(
            [self.root / ".ci" / "setup"],
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            start_new_session=True,
        )

    @property
    def versions(self) -> list[str]:
        """Of `.venv`."""
        return [folder.name for folder in (self.root / ".venv" / "lib").iterdir()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_second_set_up_does_nothing(folder: Folder) -> None:
    first, second = folder.set_up(), folder.set_up()
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout.endswith(".venv is ready\n")
    assert second.stdout == ""
    assert folder.versions == ["python3.11"]
