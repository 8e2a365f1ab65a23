"""Pages that scripts write of the code are what these write now, and other pages name no flag that there is not."""

import re

from tools import flags_page, metrics_page
from vllm_omni_plugin.config import FLAGS

from .source_tree import relative, text_files

_FLAG = re.compile(r"--omni-[a-z-]*[a-z]")
_PATTERN_OF_FLAGS = re.compile(r"--omni-[a-z-]*\*")


def test_a_page_is_what_its_script_writes() -> None:
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python -m tools.flags_page"
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m tools.metrics_page"


def test_pages_name_only_flags_that_exist() -> None:
    known = {flag.name for flag in FLAGS}
    texts = {
        relative(path): _PATTERN_OF_FLAGS.sub("", path.read_text()) for path in text_files() if path.suffix == ".md"
    }
    assert {page: unknown for page, text in texts.items() if (unknown := set(_FLAG.findall(text)) - known)} == {}
