"""Builds the archives of the last commit in dist/ and checks them: `make release-check`."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def main() -> None:
    """Build twice, compare, check the metadata, and run what the wheel installs. Ends at the first fault."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if f"## [{version}] - " not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"CHANGELOG.md has no section for {version}")
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"not committed, so not part of the release:\n{changed}")
    with tempfile.TemporaryDirectory() as folder:
        first, second = build(Path(folder, "a")), build(Path(folder, "another"))
        if contents(first) != contents(second):
            sys.exit("two builds of the commit differ; compare them with diffoscope")
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir()))
        site, wheel = f"{folder}/site", str(next(DIST.glob("*.whl")))
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"--target={site}", wheel)
        print(run(f"{site}/bin/vllm-omni-plugin", "--version", PYTHONPATH=site))
    print(f"ready: {', '.join(sorted(path.name for path in DIST.iterdir()))}")


def build(folder: Path) -> Path:
    """Build the source archive and, from it, the wheel; return their folder."""
    (folder / "tree").mkdir(parents=True)
    run("git", "archive", f"--output={folder}/tree.tar", "HEAD")
    shutil.unpack_archive(folder / "tree.tar", folder / "tree", filter="data")
    time = run("git", "log", "-1", "--format=%ct")
    run(sys.executable, "-m", "build", f"--outdir={folder}/dist", f"{folder}/tree", SOURCE_DATE_EPOCH=time)
    return folder / "dist"


def contents(dist: Path) -> list[tuple[str, bytes]]:
    """The bytes of the wheel, and the files in the source archive, which setuptools dates by the time of the build."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = [(entry.name, archive.extractfile(entry)) for entry in archive if entry.isfile()]
        return [(wheel.name, wheel.read_bytes()), *sorted((name, file.read()) for name, file in files if file)]


def run(*command: str, **variables: str) -> str:
    return subprocess.check_output(command, cwd=ROOT, env=os.environ | variables, text=True).strip()


if __name__ == "__main__":
    main()
