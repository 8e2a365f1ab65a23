"""YAML files written by users: parsing, JSON Schema, and errors that name the line and the key."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vllm_omni_plugin.errors import ConfigError, did_you_mean

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
        """Refuse keys that occur twice or are no text, and bound what merges may make of a mapping."""
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


_MAX_WHOLE_NUMBER = 2**53
_MAX_SHOWN = 60
"""Characters of a value in a message."""
_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}


def validate(document: Document, schema: Mapping[str, Any], out_of_place: Mapping[str, str] | None = None) -> None:
    """Check a file against its JSON Schema (2020-12); raises ConfigError for the first error. Numbers must be finite.

    `out_of_place` has messages by key, for keys that the schema excludes by `not` because of other keys beside them.
    """
    # jsonschema is slow to import, and most processes read no file.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    numbers = {"number": _is_finite_number, "integer": _is_whole_number}
    checker = Draft202012Validator.TYPE_CHECKER.redefine_many(numbers)
    faults = sorted(
        (error.validator == "required", document.line(place), str(place), place, message)
        for error in extend(Draft202012Validator, type_checker=checker)(dict(schema)).iter_errors(document.data)
        for place, message in [_place_and_message(error, out_of_place or {})]
    )
    if faults:
        # A missing key may be a misspelt one: the message about the misspelt key is better, so it goes first.
        *_, place, message = faults[0]
        raise document.error(message, place)


def _is_finite_number(_: Any, value: Any) -> bool:
    # Not `math.isfinite`, which raises for an integer that no float can be.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_whole_number(checker: Any, value: Any) -> bool:
    """Also 2.0, as JSON has it; not what a float cannot tell from its neighbours."""
    return _is_finite_number(checker, value) and value == int(value) and abs(value) < _MAX_WHOLE_NUMBER


def _expected_type(error: Any) -> str:
    kind, value = error.validator_value, error.instance
    is_too_large = kind == "integer" and isinstance(value, int | float) and abs(value) >= _MAX_WHOLE_NUMBER
    return _TYPES[kind] + (" below 2**53" if is_too_large else "")


def _place_and_message(error: Any, out_of_place: Mapping[str, str]) -> tuple[Place, str]:
    place: Place = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        unknown = next(key for key in error.instance if key not in known)
        return (*place, unknown), f"unknown key{did_you_mean(unknown, known)}: use {', '.join(known)}"
    if "propertyNames" in error.absolute_schema_path:
        place = (*place, error.instance)
    if error.validator == "not":
        return place, out_of_place[error.absolute_path[-1]]
    return place, _WORDING[error.validator](error)


def _must(be: str, error: Any) -> str:
    return f"must be {be}, not {_shown(error.instance)}"


_WORDING: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "dependentRequired": lambda error: (
            f"{' and '.join(repr(key) for key in error.validator_value if key in error.instance)} needs "
            + " and ".join(repr(each) for key in error.validator_value for each in error.validator_value[key])
        ),
        "enum": lambda error: (
            _must(f"one of {', '.join(error.validator_value)}", error)
            + did_you_mean(str(error.instance), error.validator_value)
        ),
        "exclusiveMinimum": lambda error: _must(f"above {error.validator_value}", error),
        "maxItems": lambda error: f"must have at most {error.validator_value} entries, not {len(error.instance)}",
        "maximum": lambda error: _must(f"at most {error.validator_value}", error),
        "maxLength": lambda error: f"must have at most {error.validator_value} characters, not {len(error.instance)}",
        "minItems": lambda error: "must not be empty",
        "minLength": lambda error: "must not be empty",
        "minimum": lambda error: _must(f"at least {error.validator_value}", error),
        "pattern": lambda error: _must(error.schema["description"], error),
        "required": lambda error: (
            f"needs {' and '.join(repr(key) for key in error.validator_value if key not in error.instance)}"
        ),
        "type": lambda error: _must(_expected_type(error), error),
        "uniqueItems": lambda error: "must not repeat an entry",
    }
)
"""Error messages by the keyword of JSON Schema that failed."""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
