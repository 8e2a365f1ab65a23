"""Set-up, release and trial of a vLLM: `make setup` runs with an interpreter that only pretends."""

import os
import shutil
import subprocess
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

from tools.try_vllm import unpack

from .source_tree import ROOT

NEEDED = (
    ".ci/setup",
    "pyproject.toml",
    "examples/cpu/requirements.txt",
    "examples/cpu/test-requirements.txt",
    "examples/cpu/vllm-alias/pyproject.toml",
)
INTERPRETER = """\
#!/usr/bin/env bash
case "$*" in
"-c "*) echo 3.11 ;;
"-m venv "*)
    folder=${@: -1}
    mkdir -p "$folder/bin" "$folder/lib/python3.11"
    cp "$0" "$folder/bin/python"
    echo "$PWD/$folder" >"$folder/bin/activate"
    ;;
esac
"""


def test_a_second_set_up_does_nothing(tmp_path: Path) -> None:
    root, programs = tmp_path / "with some spaces", tmp_path / "bin of mine"
    for name in NEEDED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    programs.mkdir()
    (programs / "python3.11").write_text(INTERPRETER)
    (programs / "python3.11").chmod(0o755)
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": "", "VLLM": ""}
    first, second = (
        subprocess.run([root / ".ci" / "setup"], env=os.environ | own, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.endswith(".venv is ready\n")
    assert second.stdout == ""


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_the_same_everywhere() -> None:
    assert version("vllm-omni-plugin") == VERSION, "install the project anew: make setup"
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith(f"## [{VERSION}] - ")


def test_a_wheel_can_be_imported_as_a_build_for_cpus(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm-0.99.0.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr("vllm/same.py", "def kept(a): ...\n")
        wheel.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\nVersion: 0.99.0\n")
    top = unpack(tmp_path / "vllm-0.99.0.whl", tmp_path / "unpacked")
    assert (top / "vllm" / "same.py").read_text() == "def kept(a): ...\n"
    (metadata,) = top.glob("*.dist-info/METADATA")
    assert "Version: 0.99.0+cpu\n" in metadata.read_text()
