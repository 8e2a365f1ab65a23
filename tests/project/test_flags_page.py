"""docs/flags.md is what tools/flags_page.py writes, and other pages name no flag that it does not have."""

import re

from tools.flags_page import PAGE, page
from vllm_omni_plugin.config import FLAGS

from .source_tree import relative, text_files

_FLAG = re.compile(r"--omni-[a-z-]*[a-z]")
_PATTERN_OF_FLAGS = re.compile(r"--omni-[a-z-]*\*")


def test_the_page_has_every_flag_as_the_code_has_it() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.flags_page"


def test_pages_name_only_flags_that_exist() -> None:
    known = {flag.name for flag in FLAGS}
    texts = {
        relative(path): _PATTERN_OF_FLAGS.sub("", path.read_text()) for path in text_files() if path.suffix == ".md"
    }
    assert {page: unknown for page, text in texts.items() if (unknown := set(_FLAG.findall(text)) - known)} == {}
