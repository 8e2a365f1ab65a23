"""The script that tries another vLLM, on a wheel made here."""

import zipfile
from pathlib import Path

from tools.try_vllm import unpack


def test_a_wheel_can_be_imported_as_a_build_for_cpus(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm-0.99.0.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr("vllm/same.py", "def kept(a): ...\n")
        wheel.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\nVersion: 0.99.0\n")
    top = unpack(tmp_path / "vllm-0.99.0.whl", tmp_path / "unpacked")
    assert (top / "vllm" / "same.py").read_text() == "def kept(a): ...\n"
    (metadata,) = top.glob("*.dist-info/METADATA")
    assert "Version: 0.99.0+cpu\n" in metadata.read_text()
