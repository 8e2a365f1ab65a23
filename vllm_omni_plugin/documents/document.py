"""A YAML file as plain data, with the line of each of its values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vllm_omni_plugin.documents.text_places import Place, worded
from vllm_omni_plugin.errors import ConfigError

_MAX_BYTES = 1024 * 1024
_MAX_VALUES = 50_000
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """What a YAML file holds.

    Attributes:
        source: name of the file.
        data: mappings with string keys, lists, strings, numbers, booleans and None.
        root: the same as PyYAML's nodes, which know where they stand.
    """

    source: str
    data: Any
    root: yaml.Node

    def error(self, message: str, place: Place) -> ConfigError:
        """What is wrong at a place, as one line `FILE:LINE: stages[1].inputs[0]: ...`."""
        return ConfigError(f"{self.source}:{self.line(place)}: {worded(message, place)}")

    def line(self, place: Place) -> int:
        """The line, from 1, of what is at a place or of its key; of what it would be in if there is nothing."""
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
    """PyYAML's loader of plain data, which refuses what JSON has not and what stands there twice."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        taken = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault(key, "a list or mapping cannot be a key")
            if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                raise _fault(key, f"the key {key.value!r} is no text: quote it")
            if key.value in taken:
                raise _fault(key, f"the key {key.value!r} is there twice")
            taken.add(key.value)
        super().flatten_mapping(node)
        # What was merged in stands in front and gives way. Merged again and again, it would grow without limit.
        node.value = list({key.value: (key, value) for key, value in node.value}.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):
            raise _fault(node, f"{node.value!r} is no value of type {node.tag.removeprefix(_TAG)!r}") from None

    def refuse(self, node: yaml.Node) -> Any:
        name = node.tag.removeprefix(_TAG)
        raise _fault(node, f"a value of type {name!r} cannot be used: quote it if it is text")


for _type in ("timestamp", "binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"{_TAG}{_type}", _Loader.refuse)
_Loader.add_constructor(None, _Loader.refuse)


def _fault(node: yaml.Node, message: str) -> ConstructorError:
    return ConstructorError(None, None, message, node.start_mark)


def read(path: Path) -> Document:
    """Read a YAML file, as `parse` does.

    Raises:
        ConfigError: it cannot be read, or used: one line that names it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES // 1024**2} MiB, which nobody writes by hand")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: byte {content[error.start]:#04x}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Read YAML, with anchors and merge keys; nothing in it is executed.

    Raises:
        ConfigError: it is empty or no YAML, repeats a key, or holds what JSON could not: one line with its number.
    """
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
        raise ConfigError(f"{source}:{line}: not usable YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: not YAML: the character U+{error.character:04X} is not allowed") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


def _fault_of_aliases(data: Any) -> str | None:
    """Whether aliases stand for more values than can be checked: a few aliases of aliases do."""
    try:
        for count, _ in enumerate(json.JSONEncoder().iterencode(data)):
            if count > _MAX_VALUES:
                return f"more than {_MAX_VALUES:,} values, those of aliases counted again"
    except ValueError:
        return "an alias of what it is in"
    return None
