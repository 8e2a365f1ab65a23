"""docs/wire.md has the messages as their structs describe them, and what is lost without harm."""

import re

from tools.wire_page import LISTS, PAGE, page

SAME_IN_ALL_VERSIONS = {"SessionRefused": "refused", "AttachRefused": "refused"}


def test_the_lists_of_messages_are_made_from_their_structs() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tools.wire_page"


def test_a_message_has_the_name_of_its_class_on_the_wire() -> None:
    tags = {struct.__name__: struct.__struct_config__.tag for structs in LISTS.values() for struct in structs}
    named = {name: tag for name, tag in tags.items() if tag is not None}
    by_class = {name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in named}
    assert len(named) > 20
    assert named == by_class | SAME_IN_ALL_VERSIONS
