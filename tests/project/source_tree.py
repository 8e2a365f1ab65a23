"""What lies in the repository: its text files, its packages and its modules."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_omni_plugin"
PACKAGE_FOLDERS = {PACKAGE: ROOT / PACKAGE, f"{PACKAGE}.entrypoints": ROOT / "entrypoints"}
"""The folders that are installed, by the dotted name they are installed under."""

_TEXT_SUFFIXES = {
    *(".cfg", ".env", ".html", ".js", ".md", ".py", ".sbatch", ".service", ".sh", ".toml", ".tpl", ".txt"),
    *(".yaml", ".yml"),
}
_TEXT_NAMES = {"Dockerfile", "Makefile", "run"}
_GENERATED_FOLDERS = {"__pycache__", "build", "dist"}
_HIDDEN_BUT_OURS = {".ci", ".github"}


@dataclass(frozen=True)
class Module:
    """One Python file that is installed."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def text_files() -> list[Path]:
    """Return every text file a person wrote, in a fixed order."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = sorted(filter(_is_ours, subfolders))
        found += [Path(folder, name) for name in sorted(names) if _is_text(name)]
    return found


def python_files() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".py"]


def packages() -> set[str]:
    """Return the dotted names of the folders that hold Python files, or nothing yet."""
    return {
        _dotted(name, root, folder)
        for name, root in PACKAGE_FOLDERS.items()
        for folder in [root, *root.rglob("*")]
        if folder.is_dir() and _is_ours(folder.name) and _may_be_package(folder)
    }


def modules() -> dict[str, Module]:
    """Return every installed module by its dotted name."""
    found = {}
    for name, root in PACKAGE_FOLDERS.items():
        for path in sorted(root.rglob("*.py")):
            dotted = _dotted(name, root, path.parent if path.name == "__init__.py" else path.with_suffix(""))
            found[dotted] = Module(dotted, path)
    return found


def relative(path: Path) -> str:
    """Return the path as a reader of a failure wants to see it."""
    return path.relative_to(ROOT).as_posix()


def _dotted(name: str, root: Path, path: Path) -> str:
    return ".".join([name, *path.relative_to(root).parts])


def _may_be_package(folder: Path) -> bool:
    return any(folder.glob("*.py")) or not any(folder.iterdir())


def _is_ours(folder_name: str) -> bool:
    if folder_name in _GENERATED_FOLDERS or folder_name.endswith(".egg-info"):
        return False
    return not folder_name.startswith(".") or folder_name in _HIDDEN_BUT_OURS


def _is_text(name: str) -> bool:
    return name in _TEXT_NAMES or Path(name).suffix in _TEXT_SUFFIXES
