"""`make setup` with an interpreter that only pretends: a second one does nothing."""

import os
import shutil
import subprocess
from pathlib import Path

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
