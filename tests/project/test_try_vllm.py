"""The script that tries another vLLM, on archives made here."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.try_vllm import Change, changes, failures, unpack, users

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


def test_another_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as other:
        other.writestr("x/__init__.py", "")
    with pytest.raises(ValueError, match="holds no package vllm"):
        unpack(tmp_path / "x.whl", tmp_path / "unpacked")


def test_modules_that_changed_are_told_with_what_we_use_of_them(tmp_path: Path) -> None:
    old = write(tmp_path / "old", FILES)
    later = {name: text for name, text in FILES.items() if name != "vllm/moved.py"}
    new = write(tmp_path / "new", later | {"vllm/other/__init__.py": "class Box:\n    def put(self, item, at): ...\n"})
    symbols = ["vllm.same.kept", "vllm.other.Box.put", "vllm.other.Box", "vllm.moved.gone"]
    assert changes(symbols, old, new) == [
        Change("vllm.moved", None, ("gone",)),
        Change("vllm.other", 2, ("Box", "Box.put")),
    ]


def test_who_uses_a_symbol_is_found_by_its_import_or_else_by_its_name() -> None:
    sources = {
        "a.py": "from vllm.other import Box\nBox().put(1)\n",
        "b.py": "queue.put(1)\n",
        "c.py": "x.taken\n",
    }
    assert users("vllm.other.Box.put", sources) == ["a.py"]
    assert users("vllm.elsewhere.Thing.taken", sources) == ["c.py"]


def test_a_report_gives_what_failed_and_why(tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.contract.test_x" name="test_good"/>'
        '<testcase classname="tests.contract.test_x" name="test_bad[a]"><failure message="why&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert failures(report) == {"test_x::test_bad[a]": "why"}
