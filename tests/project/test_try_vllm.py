"""The script that tries another vLLM, on archives made here."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.try_vllm import unpack

FILES = {
    "vllm/__init__.py": "",
    "vllm/same.py": "def kept(a): ...\n",
    "vllm/other/__init__.py": "class Box:\n    def put(self, item): ...\n",
    "vllm/moved.py": "def gone(): ...\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def archive_of(folder: Path, kind: str) -> Path:
    tree = write(folder / "tree" / "vllm-0.99.0", FILES | {"PKG-INFO": "Name: vllm\nVersion: 0.99.0\n"})
    path = folder / f"vllm-0.99.0.{kind}"
    if kind == "whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name in FILES:
                wheel.write(tree / name, name)
            wheel.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\nVersion: 0.99.0\n")
    else:
        with tarfile.open(path, "w:gz") as source:
            source.add(tree, tree.name)
    return path


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_an_archive_can_be_imported_as_a_build_for_cpus(tmp_path: Path, kind: str) -> None:
    top = unpack(archive_of(tmp_path, kind), tmp_path / "unpacked")
    assert (top / "vllm" / "same.py").read_text() == FILES["vllm/same.py"]
    (metadata,) = top.glob("*.dist-info/METADATA")
    assert "Version: 0.99.0+cpu\n" in metadata.read_text()
