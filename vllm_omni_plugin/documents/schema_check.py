"""Checks a file against its JSON Schema, with messages for the author of the file."""

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.documents.document import Document, Place
from vllm_omni_plugin.errors import did_you_mean

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

    checker = Draft202012Validator.TYPE_CHECKER.redefine("number", _is_finite_number)
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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
        "type": lambda error: _must(_TYPES[error.validator_value], error),
        "uniqueItems": lambda error: "must not repeat an entry",
    }
)
"""Error messages by the keyword of JSON Schema that failed."""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
