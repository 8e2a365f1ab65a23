"""YAML text as plain data that knows the line of each of its values."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline.places import Place, outwards, worded

_MAX_VALUES = 50_000
"""A few aliases of aliases could stand for more values than memory holds."""
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_TYPES: dict[type[yaml.Node], set[str]] = {
    yaml.ScalarNode: {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null")},
    yaml.SequenceNode: {f"{_TAG}seq"},
    yaml.MappingNode: {f"{_TAG}map"},
}
"""Those that JSON has, too."""


@dataclass(frozen=True)
class Document:
    """What a YAML file holds.

    Attributes:
        source: name of the file.
        data: mappings with string keys, lists, strings, numbers, booleans and None.
        lines: the line of each value, or of its key, counted from 1.
    """

    source: str
    data: Any
    lines: dict[Place, int]

    def error(self, message: str, place: Place) -> ConfigError:
        """What is wrong at a place, as one line `FILE:LINE: stages[1].inputs[0]: ...`."""
        return ConfigError(f"{self.source}:{self.line(place)}: {worded(message, place)}")

    def line(self, place: Place) -> int:
        """The line of what is at a place, or else of what it would be in."""
        return next(self.lines[outer] for outer in outwards(place) if outer in self.lines)


def parse(text: str, source: str) -> Document:
    """Read YAML, with anchors and merge keys; nothing in it is executed.

    Args:
        text: what the file holds.
        source: its name, for messages.

    Raises:
        ConfigError: it is empty or no YAML, repeats a key, or holds what JSON could not: one line with its number.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{source}: the file is empty")
        return _Reader(source, loader).document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{source}:{line}: not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: not YAML: the character U+{error.character:04X} is not allowed") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


@dataclass
class _Reader:
    source: str
    loader: yaml.SafeLoader
    lines: dict[Place, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """The nodes around the current one, by identity."""
    values: int = 0

    def document(self, root: yaml.Node) -> Document:
        self.lines[()] = _line(root)
        return Document(self.source, self._value(root, ()), self.lines)

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self.values += 1
        if self.values > _MAX_VALUES:
            raise self._error(node, place, f"more than {_MAX_VALUES:,} values, those of aliases counted again")
        if id(node) in self.open:
            raise self._error(node, place, "an alias of what it is in")
        if node.tag not in _TYPES[type(node)]:
            name = node.tag.removeprefix(_TAG)
            raise self._error(node, place, f"a value of type {name!r} cannot be used: quote it if it is text")
        self.open.add(id(node))
        value = self._unchecked(node, place)
        self.open.discard(id(node))
        return value

    def _unchecked(self, node: yaml.Node, place: Place) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[*place, index] = _line(item)
            return [self._value(item, (*place, index)) for index, item in enumerate(node.value)]
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError):
            name = node.tag.removeprefix(_TAG)
            raise self._error(node, place, f"{node.value!r} is no value of type {name!r}") from None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        # What is merged first wins, and the mapping's own keys over all: so they are read last.
        for source in reversed([value for key, value in node.value if key.tag == _MERGE]):
            maps = source.value if isinstance(source, yaml.SequenceNode) else [source]
            for inherited in reversed(maps):
                if not isinstance(inherited, yaml.MappingNode):
                    raise self._error(inherited, place, "'<<' takes mappings only")
                merged |= self._value(inherited, place)
        return merged | self._own(node, place)

    def _own(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, place, "a list or mapping cannot be a key")
            if key.tag != f"{_TAG}str":
                raise self._error(key, place, f"the key {key.value!r} is no text: quote it")
            if key.value in own:
                raise self._error(key, (*place, key.value), "the key is there twice")
            self.lines[*place, key.value] = _line(key)
            own[key.value] = self._value(value, (*place, key.value))
        return own

    def _error(self, node: yaml.Node, place: Place, message: str) -> ConfigError:
        return ConfigError(f"{self.source}:{_line(node)}: {worded(message, place)}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
