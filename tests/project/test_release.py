"""What a release is made from names the same version everywhere."""

import tomllib
from importlib.metadata import version

from .source_tree import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_the_same_everywhere() -> None:
    assert version("vllm-omni-plugin") == VERSION, "install the project anew: make setup"
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith(f"## [{VERSION}] - ")
