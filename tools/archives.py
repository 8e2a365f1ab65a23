"""The archives of a release, a source archive and a wheel: the same bytes for the same sources."""

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

_HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
_SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
_UNRELEASED = "## [Unreleased]"
_RELEASE = re.compile(r"## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d")
_MADE = re.compile(r"PKG-INFO|setup\.cfg|[^/]+\.egg-info/.*")
"""What setuptools adds to a source archive."""


@dataclass(frozen=True)
class Archives:
    """The two files of a release."""

    sdist: Path
    wheel: Path


def build(tree: Path, out: Path, epoch: int) -> Archives:
    """Build the source archive of a tree, and the wheel from what is in that archive alone.

    Needs the setuptools of this environment; another version, or another Python or zlib, may give other bytes. Leaves
    setuptools' notes in the tree.

    Args:
        tree: with pyproject.toml.
        out: an empty folder, for the archives and for what the wheel is built in.
        epoch: seconds since 1970, the time of all files in the archives.

    Raises:
        subprocess.CalledProcessError: setuptools failed. `output` says why.
    """
    _run_hook("build_sdist", tree, out, epoch)
    (sdist,) = out.glob("*.tar.gz")
    normalise(sdist, epoch)
    unpacked = unpack(sdist, out / "unpacked")
    _run_hook("build_wheel", unpacked, out, epoch)
    (wheel,) = out.glob("*.whl")
    return Archives(sdist, wheel)


def normalise(sdist: Path, epoch: int) -> None:
    """Write a source archive anew, so that it depends on names, contents, who may execute what, and `epoch` alone."""
    with tarfile.open(sdist) as old:
        files = [(entry, _content(old, entry)) for entry in old.getmembers() if entry.isfile()]
    with (
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry, content in sorted(files, key=lambda file: file[0].name):
            normal = tarfile.TarInfo(entry.name)
            normal.size, normal.mtime = len(content), epoch
            normal.mode = 0o755 if entry.mode & 0o100 else 0o644
            new.addfile(normal, io.BytesIO(content))


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source archive; returns the one folder that it holds."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def sdist_faults(sdist: Path, tracked: Set[str]) -> list[str]:
    """What a source archive lacks of these files, and has beside them. What setuptools adds does not count."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return _differences(_without_made(names), _without_made(tracked), "MANIFEST.in")


def wheel_faults(wheel: Path, tree: Path) -> list[str]:
    """What a wheel lacks of the package in this tree, and has beside it and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    return _differences(names, set(_installed(tree)), "pyproject.toml, [tool.setuptools]")


def path_faults(archive: Path, folders: list[Path]) -> list[str]:
    """Files of an archive that name one of these folders."""
    words = [str(folder).encode() for folder in folders]
    return [f"{name} names {word.decode()}" for name, content in _files(archive) for word in words if word in content]


def version_of(tree: Path) -> str:
    """The version of a tree: pyproject.toml is the one place that has it."""
    version: str = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
    return version


def changelog_faults(changelog: str, version: str) -> list[str]:
    """What is wrong with a change log for the release of a version; its form is that of keepachangelog.com."""
    headings = [line for line in changelog.splitlines() if line.startswith("## ")]
    named = [line for line in headings if line != _UNRELEASED]
    releases = [tuple(map(int, found.groups())) for line in named if (found := _RELEASE.fullmatch(line))]
    faults = []
    if headings[:1] != [_UNRELEASED]:
        faults.append("the first section is not [Unreleased]")
    if len(releases) != len(named):
        faults.append("a section is not named as in: ## [1.2.3] - 2026-01-31")
    if releases != sorted(releases, reverse=True):
        faults.append("versions do not fall from the top")
    if not releases or ".".join(map(str, releases[0])) != version:
        faults.append(f"the newest release is not {version}, as pyproject.toml says")
    kinds = {line.removeprefix("### ") for line in changelog.splitlines() if line.startswith("### ")}
    return faults + [f"no kind of change: {kind}" for kind in sorted(kinds - _SECTIONS)]


def unreleased(changelog: str) -> list[str]:
    """The notes of a change log that are of no version yet."""
    _, _, rest = changelog.partition(_UNRELEASED)
    return [line for line in rest.partition("\n## ")[0].splitlines() if line.strip()]


def _run_hook(name: str, tree: Path, out: Path, epoch: int) -> None:
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(
        [sys.executable, "-c", _HOOK, name, str(out)],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        umask=0o022,
    )


def _content(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(entry)
    assert opened is not None, "it is a file"
    return opened.read()


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(archive) as sdist:
            yield from ((entry.name, _content(sdist, entry)) for entry in sdist.getmembers())


def _without_made(names: Set[str]) -> set[str]:
    return {name for name in names if not _MADE.fullmatch(name)}


def _installed(tree: Path) -> Iterator[str]:
    """Where the files of the package lie in the wheel."""
    settings = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]
    (package,) = {name.partition(".")[0] for name in settings["packages"]}
    folders = {package: package, **settings["package-dir"]}
    for name, folder in folders.items():
        for path in (tree / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name.replace('.', '/')}/{path.relative_to(tree / folder).as_posix()}"


def _differences(found: Set[str], wanted: Set[str], where: str) -> list[str]:
    lacking = [f"lacks {name}: see {where}" for name in sorted(wanted - found)]
    return lacking + [f"has {name}: see {where}" for name in sorted(found - wanted)]
