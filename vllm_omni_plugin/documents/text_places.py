"""Where in a file something is wrong: the keys that lead there."""

import re

Place = tuple[str | int, ...]
"""Keys of mappings and indexes of lists, from the whole file down."""


_BARE = re.compile(r"[\w-]+")
"""A key that needs no quotes."""


def worded(message: str, place: Place) -> str:
    """The message behind the place as people write it: `stages[1].inputs[0]: ...`."""
    keys = (f".{key}" if isinstance(key, str) and _BARE.fullmatch(key) else f"[{key!r}]" for key in place)
    return f"{''.join(keys).lstrip('.')}: {message}" if place else message
