"""docs/flags.md is what tools/flags_page.py writes."""

from tools.flags_page import PAGE, page


def test_the_page_has_every_flag_as_the_code_has_it() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.flags_page"
