"""What another version of vLLM would break: its sources against our contract tests, and what changed where we touch it.

    python -m tools.try_vllm vllm-0.34.0.tar.gz

Takes a source archive or a wheel, as `pip download --no-deps vllm==...` leaves it, and installs nothing: for the tests
alone the sources come before the installed vLLM, whose kernels they get. Ends with 1 if a test fails.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.contract.resolution import read_symbols
from tests.contract.usage import names_of, vllm_names

ROOT = Path(__file__).parents[1]
CONTRACT = ROOT / "tests" / "contract"
PACKAGE = ROOT / "vllm_omni_plugin"
_SYMBOL_TEST = re.compile(r"test_symbol_is_what_we_take_it_for\[(.+)\]")
_VERSION = re.compile(r"^Version: (\d+\.\d+[\w.]*)", re.MULTILINE)


class Change(NamedTuple):
    """A module of vLLM's that holds symbols of ours and is not what it was.

    Attributes:
        module: its dotted name.
        lines: how many of its lines were added or removed; None: it is gone.
        symbols: what we use of it.
    """

    module: str
    lines: int | None
    symbols: tuple[str, ...]


def unpack(archive: Path, folder: Path) -> Path:
    """Lay the sources of an archive out so that they can be imported.

    Returns:
        The folder to put on the path, which has the package `vllm` and its metadata.

    Raises:
        ValueError: the archive holds no vLLM.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
    found = min(folder.glob("**/vllm/__init__.py"), key=lambda path: len(path.parts), default=None)
    if found is None:
        raise ValueError(f"{archive} holds no package vllm")
    top = found.parents[1]
    _write_metadata(top)
    return top


def _write_metadata(top: Path) -> None:
    """vLLM takes the platform from the version in its metadata, which must say "cpu"."""
    described = [*top.glob("vllm-*.dist-info/METADATA"), top / "PKG-INFO"]
    texts = [path.read_text() for path in described if path.is_file()]
    version = next((found[1] for text in texts if (found := _VERSION.search(text))), "0+unknown")
    for metadata in top.glob("vllm-*.dist-info"):
        metadata.rename(metadata.with_suffix(".was"))
    folder = top / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    generated = top / "vllm" / "_version.py"
    if not generated.exists():
        generated.write_text(f"__version__ = {version!r}\n__version_tuple__ = {tuple(version.split('.'))!r}\n")


def link_kernels(installed: Path, top: Path) -> None:
    """Let the sources use the installed vLLM's compiled parts."""
    for library in installed.glob("*.so"):
        (top / "vllm" / library.name).unlink(missing_ok=True)
        (top / "vllm" / library.name).symlink_to(library)


def changes(symbols: Sequence[str], old: Path, new: Path) -> list[Change]:
    """The modules of these symbols that differ between two folders which hold a package `vllm`."""
    by_module: defaultdict[Path, list[str]] = defaultdict(list)
    for symbol in symbols:
        path = module_file(symbol, old)
        if path is not None:
            by_module[path].append(symbol)
    found = []
    for path, held in sorted(by_module.items()):
        before = (old / path).read_text().splitlines()
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        names = tuple(sorted({symbol.removeprefix(f"{module}.") for symbol in held}))
        if not (new / path).is_file():
            found.append(Change(module, None, names))
            continue
        after = (new / path).read_text().splitlines()
        lines = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:1] in "+-"]
        if lines:
            # Two of them name the files.
            found.append(Change(module, len(lines) - 2, names))
    return found


def module_file(symbol: str, folder: Path) -> Path | None:
    """The file of the module that holds a symbol, relative to the folder."""
    parts = symbol.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (folder / candidate).is_file():
                return candidate
    return None


def users(symbol: str, sources: Mapping[str, str]) -> list[str]:
    """Which of our modules use a symbol: those that import it or its owner; else those that have its name at all."""
    owner, _, name = symbol.rpartition(".")
    imports = [path for path, text in sources.items() if {symbol, owner} & vllm_names(text) and name in names_of(text)]
    return imports or [path for path, text in sources.items() if name in names_of(text)]


def failures(report: Path) -> dict[str, str]:
    """The tests of a JUnit report that failed, each with the first line of what it said."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for what in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            found[name] = (what.get("message") or "").partition("\n")[0]
    return found


def run_contract_tests(top: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Run the contract tests with the vLLM in a folder. Returns what `failures` does."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Not by an entry in PYTHONPATH of the user's: it comes first.
        environment = {**os.environ, "PYTHONPATH": str(top), "VLLM_TARGET_DEVICE": "cpu"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.is_file():
            return {"collection": (done.stdout + done.stderr)[-2000:]}
        return failures(report)


def print_report(broken: Mapping[str, str], changed: Sequence[Change]) -> None:
    """Say what is broken, with who uses it, then what changed."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    print(f"{len(broken)} contract tests fail")
    for name, reason in broken.items():
        print(f"  {name}\n    {reason}")
        if symbol := _SYMBOL_TEST.search(name):
            print(f"    used by {', '.join(users(symbol[1], sources))}")
    print(f"\n{len(changed)} modules of vLLM that hold symbols of ours changed")
    for change in changed:
        print(f"  {change.module}: {'gone' if change.lines is None else f'{change.lines} lines'}")
        print(f"    {', '.join(change.symbols)}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.try_vllm", description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, help="a source archive or wheel of vLLM")
    parser.add_argument("tests", nargs="*", default=[str(CONTRACT)], help="what to run instead of all contract tests")
    args = parser.parse_args()
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    installed = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        top = unpack(args.archive, Path(folder))
        link_kernels(installed, top)
        symbols = [symbol.path for symbol in read_symbols((CONTRACT / "symbols.txt").read_text())]
        changed = changes(symbols, installed.parent, top)
        broken = run_contract_tests(top, args.tests)
    print_report(broken, changed)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
