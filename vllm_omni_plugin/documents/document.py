"""A YAML file as plain data, with the line of each value."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vllm_omni_plugin.errors import ConfigError

_MAX_BYTES = 1024 * 1024
_MAX_VALUES = 50_000
_TAG = "tag:yaml.org,2002:"
_BARE_KEY = re.compile(r"[\w-]+")

Place = tuple[str | int, ...]
"""Where a value is in a file: keys of mappings and indexes of lists, from the root down."""


@dataclass(frozen=True)
class Document:
    """The content of a YAML file: plain ``data``, and in ``root`` the same as PyYAML's nodes, with line numbers."""

    source: str
    data: Any
    root: yaml.Node

    def error(self, message: str, place: Place) -> ConfigError:
        return ConfigError(f"{self.source}:{self.line(place)}: {at_place(message, place)}")

    def line(self, place: Place) -> int:
        """The line of the key or value at a place, from 1; if there is none, the line of what would contain it."""
        node, mark = self.root, self.root.start_mark
        for key in place:
            if isinstance(node, yaml.MappingNode):
                children = {name.value: (value, name.start_mark) for name, value in node.value}
            elif isinstance(node, yaml.SequenceNode):
                children = {index: (item, item.start_mark) for index, item in enumerate(node.value)}
            else:
                break
            if key not in children:
                break
            node, mark = children[key]
        return int(mark.line) + 1


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses types that JSON does not have and repeated keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        taken = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault(key, "a list or mapping cannot be a key")
            if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                raise _fault(key, f"the key {key.value!r} is not text: quote it")
            if key.value in taken:
                raise _fault(key, f"the key {key.value!r} occurs twice")
            taken.add(key.value)
        super().flatten_mapping(node)
        # Merged entries come first; later entries override them. Without this, repeated merges grow without limit.
        node.value = list({key.value: (key, value) for key, value in node.value}.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):
            raise _fault(node, f"{node.value!r} is not a value of type {node.tag.removeprefix(_TAG)!r}") from None

    def refuse(self, node: yaml.Node) -> Any:
        name = node.tag.removeprefix(_TAG)
        raise _fault(node, f"a value of type {name!r} cannot be used: quote it if it is text")


for _type in ("timestamp", "binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"{_TAG}{_type}", _Loader.refuse)
_Loader.add_constructor(None, _Loader.refuse)


def at_place(message: str, place: Place) -> str:
    """The message with its place in front: `stages[1].inputs[0]: MESSAGE`."""
    keys = (f".{key}" if isinstance(key, str) and _BARE_KEY.fullmatch(key) else f"[{key!r}]" for key in place)
    return f"{''.join(keys).lstrip('.')}: {message}" if place else message


def _fault(node: yaml.Node, message: str) -> ConstructorError:
    return ConstructorError(None, None, message, node.start_mark)


def read(path: Path) -> Document:
    """Read and parse a YAML file. Raises ConfigError: one line that names the file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES // 1024**2} MiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: byte {content[error.start]:#04x}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Parse YAML with anchors and merge keys. Nothing in it is executed. Raises ConfigError with the line number."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{source}: the file is empty")
        data = loader.construct_document(root)
        if (fault := _fault_of_aliases(data)) is not None:
            raise ConfigError(f"{source}: {fault}")
        return Document(source, data, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{source}:{line}: invalid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: invalid YAML: the character U+{error.character:04X} is not allowed"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


def _fault_of_aliases(data: Any) -> str | None:
    """What is wrong with the aliases: nested aliases can expand to more values than can be checked."""
    try:
        for count, _ in enumerate(json.JSONEncoder().iterencode(data)):
            if count > _MAX_VALUES:
                return f"more than {_MAX_VALUES:,} values after aliases are expanded"
    except ValueError:
        return "an alias that contains itself"
    return None
