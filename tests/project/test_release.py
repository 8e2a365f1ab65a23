"""The archives of a release: the same bytes for the same sources, complete, and with nothing of the machine."""

import os
import shutil
import subprocess
import tarfile
import zipfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.archives import (
    Archives,
    build,
    changelog_faults,
    normalise,
    path_faults,
    sdist_faults,
    unreleased,
    version_of,
    wheel_faults,
)
from tools.release_check import tag_faults

from .source_tree import ROOT

EPOCH = 1_700_000_000
GENERATED = (".venv*", ".git", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


def listed(*options: str) -> set[str]:
    told = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(filter(None, told.stdout.split("\0")))


def copy_of_the_project(folder: Path) -> Path:
    if not (ROOT / ".git").exists():
        return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*GENERATED)))
    for name in listed("--cached", "--others", "--exclude-standard"):
        # One that is tracked may have been deleted, and a file of nobody may vanish meanwhile.
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy(ROOT / name, folder / name)
    return folder


def untracked() -> set[str]:
    return listed("--others", "--exclude-standard") if (ROOT / ".git").exists() else set()


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archives, Archives]:
    """Of two copies in folders of other names, whose files are of another time and for other users."""
    made = []
    for name, umask in (("one", 0o022), ("two of them", 0o077)):
        folder = tmp_path_factory.mktemp(name)
        before = os.umask(umask)
        try:
            tree = copy_of_the_project(folder / "tree")
            for path in tree.rglob("*.py"):
                os.utime(path)
                path.chmod(0o666 & ~umask)
            (folder / "out").mkdir()
            made.append(build(tree, folder / "out", EPOCH))
        finally:
            os.umask(before)
    return made[0], made[1]


def test_the_same_sources_give_the_same_bytes(builds: tuple[Archives, Archives]) -> None:
    first, second = builds
    assert first.sdist.name == second.sdist.name == f"vllm_omni_plugin-{version_of(ROOT)}.tar.gz"
    assert first.sdist.read_bytes() == second.sdist.read_bytes()
    assert first.wheel.read_bytes() == second.wheel.read_bytes()


def test_the_source_archive_has_every_file_and_the_wheel_the_package_alone(builds: tuple[Archives, Archives]) -> None:
    archives, _ = builds
    tree = archives.sdist.parents[1] / "tree"
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    with tarfile.open(archives.sdist) as archive:
        archived = {name.partition("/")[2] for name in archive.getnames()}
    # Whatever else lies in a checkout may be in the archive, and may not.
    stray = untracked() - archived
    assert {"pyproject.toml", "LICENSE", "tests/project/test_release.py"} <= files - stray
    assert sdist_faults(archives.sdist, files - stray) == []
    assert wheel_faults(archives.wheel, tree) == []


def test_no_archive_names_a_folder_of_the_machine(builds: tuple[Archives, Archives]) -> None:
    archives, _ = builds
    # The folder of the build alone: that of the checkout may be any word, such as /src.
    folders = [archives.sdist.parents[1]]
    assert path_faults(archives.sdist, folders) + path_faults(archives.wheel, folders) == []


def test_what_may_be_executed_stays_so(builds: tuple[Archives, Archives]) -> None:
    with tarfile.open(builds[0].sdist) as archive:
        modes = {entry.name.partition("/")[2]: entry.mode for entry in archive.getmembers()}
        assert {entry.mtime for entry in archive.getmembers()} == {EPOCH}
    assert (modes[".ci/setup"], modes["README.md"]) == (0o755, 0o644)


def test_the_version_is_the_same_everywhere() -> None:
    assert version("vllm-omni-plugin") == version_of(ROOT), "install the project anew: make setup"
    assert changelog_faults((ROOT / "CHANGELOG.md").read_text(), version_of(ROOT)) == []


GOOD = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-01\n\n### Added\n\n- A.\n\n## [0.1.0] - 2026-01-31\n"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("## [Unreleased]\n", "", "the first section is not [Unreleased]"),
        (" - 2026-01-31", "", "a section is not named as in"),
        ("[0.1.0]", "[0.3.0]", "versions do not fall from the top"),
        ("[0.2.0]", "[0.2.1]", "the newest release is not 0.2.0"),
        ("### Added", "### News", "no kind of change: News"),
    ],
)
def test_a_change_log_that_does_not_go_with_the_release_is_told(old: str, new: str, fault: str | None) -> None:
    faults = changelog_faults(GOOD.replace(old, new) if old else GOOD, "0.2.0")
    assert len(faults) == (fault is not None)
    assert fault is None or faults[0].startswith(fault)


def test_notes_that_are_of_no_version_are_told() -> None:
    assert unreleased(GOOD) == []
    notes = "## [Unreleased]\n\n### Fixed\n\n- B.\n"
    assert unreleased(GOOD.replace("## [Unreleased]\n", notes)) == ["### Fixed", "- B."]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_version_whose_tag_is_on_another_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hook of the project's own repository would set them.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, check=True)

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    assert tag_faults(tmp_path, "0.2.0") == []
    git("tag", "-a", "-m", "a release", "v0.2.0")
    assert tag_faults(tmp_path, "0.2.0") == []
    git("commit", "--allow-empty", "-m", "second")
    (fault,) = tag_faults(tmp_path, "0.2.0")
    assert fault.startswith("the tag v0.2.0 is on another commit: ")
    assert tag_faults(tmp_path, "0.2.1") == []


def test_a_file_that_is_left_out_or_too_much_is_told(tmp_path: Path) -> None:
    sdist, wheel = tmp_path / "p-1.tar.gz", tmp_path / "p-1.whl"
    (tmp_path / "p-1" / "src").mkdir(parents=True)
    (tmp_path / "p-1" / "src" / "secret.txt").write_text(f"in {tmp_path}/x")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "p-1", "p-1")
    normalise(sdist, EPOCH)
    assert sdist_faults(sdist, {"LICENSE"}) == ["lacks LICENSE: see MANIFEST.in", "has src/secret.txt: see MANIFEST.in"]
    assert path_faults(sdist, [tmp_path]) == [f"p-1/src/secret.txt names {tmp_path}"]
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools]\npackages = ["p"]\npackage-dir = {"p.e" = "e"}\n')
    for name in ("p/a.py", "e/b.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with zipfile.ZipFile(wheel, "w") as other:
        for name in ("p/a.py", "tests/t.py", "p-1.dist-info/RECORD"):
            other.writestr(name, "")
    where = "pyproject.toml, [tool.setuptools]"
    assert wheel_faults(wheel, tmp_path) == [f"lacks p/e/b.json: see {where}", f"has tests/t.py: see {where}"]
