"""docs/wire.md has the messages as their structs describe them, and what is lost without harm."""

from tools.wire_page import PAGE, page


def test_the_tables_of_messages_are_made_from_their_structs() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tools.wire_page"
