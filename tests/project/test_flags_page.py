"""docs/flags.md is what tools/flags_page.py writes, and other pages name no flag that it does not have."""

import re
from pathlib import Path

import pytest

from tools.flags_page import PAGE, page
from vllm_omni_plugin.config import FLAGS

from .source_tree import relative, text_files

DOCUMENTS = [path for path in text_files() if path.suffix == ".md"]
_FLAG = re.compile(r"--omni-[a-z-]*[a-z]")
_PATTERN_OF_FLAGS = re.compile(r"--omni-[a-z-]*\*")


def test_the_page_has_every_flag_as_the_code_has_it() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.flags_page"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_a_page_names_only_flags_that_exist(document: Path) -> None:
    named = set(_FLAG.findall(_PATTERN_OF_FLAGS.sub("", document.read_text())))
    assert named - {flag.name for flag in FLAGS} == set()
