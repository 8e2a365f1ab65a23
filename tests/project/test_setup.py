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


def test_a_set_up_for_another_python_stays_unless_one_is_named(folder: Folder) -> None:
    newer = folder.interpreter("python3.12", "3.12")
    folder.set_up(newer)
    assert folder.versions == ["python3.12"]
    assert folder.set_up().stdout == ""
    assert folder.set_up(newer).stdout == ""
    assert "removing an unusable .venv" in folder.set_up(folder.default).stdout
    assert folder.versions == ["python3.11"]


def test_after_a_python_without_packages_the_usual_one_is_taken(folder: Folder) -> None:
    failed = folder.set_up(folder.interpreter("python3.14", "3.14", no_packages="none"))
    assert failed.returncode == 1
    assert "install_torch" in failed.stderr
    done = folder.set_up()
    assert (done.returncode, folder.versions) == (0, ["python3.11"]), done.stderr


def test_a_folder_of_a_python_that_is_too_old_is_made_anew(folder: Folder) -> None:
    old = folder.interpreter("python3.10", "3.10")
    subprocess.run([old, "-m", "venv", ".venv"], cwd=folder.root, check=True)
    done = folder.set_up()
    assert (done.returncode, folder.versions) == (0, ["python3.11"]), done.stderr


def test_a_set_up_whose_python_was_upgraded_is_made_anew(folder: Folder) -> None:
    folder.set_up()
    folder.interpreter("python", "3.13", folder.root / ".venv" / "bin" / "python")
    assert "removing an unusable .venv" in folder.set_up().stdout
    assert folder.versions == ["python3.11"]


def test_a_python_that_is_too_old_or_none_is_named(folder: Folder) -> None:
    for python in (folder.interpreter("python3.9", "3.9"), Path("/no such python")):
        done = folder.set_up(python)
        assert done.returncode == 1
        assert f"no Python 3.11 or newer among: {python};" in done.stderr


def test_a_newer_vllm_is_put_over_another_python_once(folder: Folder) -> None:
    other = folder.interpreter("python3.12", "3.12")
    for python in (folder.default, other):
        done = folder.set_up(python, vllm="0.33")
        assert done.stdout.endswith(".venv-0.33 is ready\n"), done.stderr
        assert folder.set_up(python, vllm="0.33").stdout == ""


def test_the_rust_front_end_lies_where_vllm_looks_and_is_taken_once_on_a_machine(folder: Folder) -> None:
    folder.set_up(vllm="0.33")
    (installed,) = (folder.root / ".venv-0.33" / "lib").glob("python*/site-packages/vllm/vllm-rs")
    assert os.access(installed, os.X_OK)
    shutil.rmtree(folder.root / ".venv-0.33")
    done = folder.set_up(vllm="0.33")
    assert (done.returncode, installed.exists()) == (0, True), done.stderr
    assert (folder.root / "taken").read_text() == "taken\n"


def test_a_rust_front_end_of_another_version_is_refused(folder: Folder) -> None:
    (folder.root / "of-version").write_text("0.34.0")
    for done in (folder.set_up(vllm="0.33"), folder.set_up(vllm="0.33")):
        assert done.returncode == 1
        assert 'vllm/vllm-rs is "vllm-rs 0.34.0" instead of vllm-rs 0.33.0: correct examples/cpu/' in done.stderr


def test_a_build_that_is_interrupted_leaves_nothing_behind(folder: Folder) -> None:
    folder.set_up()
    interrupt = folder.root / "interrupt"
    interrupt.touch()
    assert folder.set_up(vllm="0.33").returncode == 130
    # Where the wheel is kept: to move it from another file system is to copy it, which may be interrupted, too.
    kept = folder.cache / "vllm-omni-plugin"
    assert Path((folder.root / "built-in").read_text().strip()).parent.parent == kept
    assert list(kept.iterdir()) == []
    interrupt.unlink()
    done = folder.set_up(vllm="0.33")
    assert (done.returncode, [path.name for path in kept.rglob("*.whl")]) == (0, ["vllm.whl"]), done.stderr
