"""Where in a pipeline something is wrong: the keys that lead there."""

import re

from vllm_omni_plugin.errors import ConfigError

Place = tuple[str | int, ...]
"""Keys of mappings and indexes of lists, from the whole pipeline down."""


_BARE = re.compile(r"[\w-]+")
"""A key that needs no quotes."""


class PipelineError(ConfigError):
    """Stages that make no pipeline."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(worded(message, place))
        self.message = message
        self.place = place


def worded(message: str, place: Place) -> str:
    """The message behind the place as people write it: `stages[1].inputs[0]: ...`."""
    keys = (f".{key}" if isinstance(key, str) and _BARE.fullmatch(key) else f"[{key!r}]" for key in place)
    return f"{''.join(keys).lstrip('.')}: {message}" if place else message
