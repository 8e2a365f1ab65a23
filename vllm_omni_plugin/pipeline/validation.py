"""Whether a pipeline's file has the shape that `schema.json` describes."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.errors import did_you_mean
from vllm_omni_plugin.pipeline.document import Document
from vllm_omni_plugin.pipeline.places import Place

_OUT_OF_PLACE = {
    "options": "only a Python engine has options; vLLM's has 'engine_args'",
    "model": "only for engine: vllm; a Python engine has 'options'",
    "engine_args": "only for engine: vllm; a Python engine has 'options'",
    "chunk_size": "only with async_chunk: true",
    "min_prompt_tokens": "only with output: kv_cache",
}
"""Messages for keys that other keys of the stage exclude."""
_MAX_SHOWN = 60
"""Characters of a value in a message."""
_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "object": "a mapping",
    "string": "text",
}


@cache
def schema() -> Mapping[str, Any]:
    """The JSON Schema (2020-12) of a pipeline's file."""
    text = files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    return MappingProxyType(json.loads(text))


def validate(document: Document) -> None:
    """Check a file's shape.

    Raises:
        ConfigError: for the first fault in the file.
    """
    # jsonschema takes as long to import as everything else here together, and most processes load no pipeline.
    from jsonschema import Draft202012Validator

    faults = sorted(
        (error.validator == "required", document.line(place), str(place), place, message)
        for error in Draft202012Validator(dict(schema())).iter_errors(document.data)
        for place, message in [_place_and_message(error)]
    )
    if faults:
        # A key that is missing may be one that is misspelt, and then that is the better message.
        *_, place, message = faults[0]
        raise document.error(message, place)


def _place_and_message(error: Any) -> tuple[Place, str]:
    """The place of a jsonschema error, and a message for the author of the file."""
    place: Place = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        unknown = next(key for key in error.instance if key not in known)
        return (*place, unknown), f"unknown key{did_you_mean(unknown, known)}: use {', '.join(known)}"
    if "propertyNames" in error.absolute_schema_path:
        place = (*place, error.instance)
    return place, _WORDING[error.validator](error)


def _must(be: str, error: Any) -> str:
    return f"must be {be}, not {_shown(error.instance)}"


_WORDING: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "enum": lambda error: (
            _must(f"one of {', '.join(error.validator_value)}", error)
            + did_you_mean(str(error.instance), error.validator_value)
        ),
        "minItems": lambda error: "must not be empty",
        "minLength": lambda error: "must not be empty",
        "minimum": lambda error: _must(f"at least {error.validator_value}", error),
        "not": lambda error: _OUT_OF_PLACE[error.absolute_path[-1]],
        "pattern": lambda error: _must(error.schema["description"], error),
        "required": lambda error: (
            f"needs {' and '.join(repr(key) for key in error.validator_value if key not in error.instance)}"
        ),
        "type": lambda error: _must(_TYPES[error.validator_value], error),
        "uniqueItems": lambda error: "must name each only once",
    }
)
"""Messages for errors, by the keyword of JSON Schema that failed."""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
