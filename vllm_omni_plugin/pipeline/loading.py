"""From a YAML file to a pipeline. Everything that can be wrong with the file is found out here."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.errors import ConfigError, did_you_mean
from vllm_omni_plugin.pipeline.document import Document, parse
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.places import PipelineError, Place
from vllm_omni_plugin.pipeline.stage import Modality, Stage

_MAX_BYTES = 1024 * 1024
_WHOLE_NUMBERS = ("id", "replicas", "chunk_size", "min_prompt_tokens")


StageCheck = Callable[[Pipeline, Stage], None]
"""Looks at one stage more closely. Raises PipelineError with the place in that stage."""


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


def load_pipeline(path: str | os.PathLike[str], checks: Iterable[StageCheck] = ()) -> Pipeline:
    """Read and check a pipeline's file, which `schema.json` and docs/pipelines.md describe.

    Args:
        checks: what else must be right with each stage, in this order.

    Raises:
        ConfigError: one line that names the file, and where there is one the line and the key.
    """
    document = parse(_read(Path(path)), str(path))
    validate(document)
    stages = tuple(_stage(document, index, given) for index, given in enumerate(document.data["stages"]))
    try:
        pipeline = Pipeline(stages)
    except PipelineError as error:
        raise document.error(error.message, error.place) from None
    checks = tuple(checks)
    for index, stage in enumerate(stages):
        try:
            for check in checks:
                check(pipeline, stage)
        except PipelineError as error:
            raise document.error(error.message, ("stages", index, *_as_written(document, index, error.place))) from None
    return pipeline


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES // 1024**2} MiB, so hardly a pipeline")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: byte {content[error.start]:#04x}") from None


def _stage(document: Document, index: int, given: dict[str, Any]) -> Stage:
    engine_args = _engine_args(document, ("stages", index, "engine_args"), given.get("engine_args", {}))
    typed: dict[str, Any] = {
        "engine_args": engine_args,
        "inputs": tuple(given.get("inputs", ())),
        "output": Modality(given["output"]),
    }
    # JSON Schema counts 1.0 among the integers.
    numbers: dict[str, Any] = {key: int(given[key]) for key in _WHOLE_NUMBERS if key in given}
    return Stage(**given | typed | numbers)


def _engine_args(document: Document, place: Place, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with underscores in their names; what follows a dot names a part of the value and stays."""
    named: dict[str, str] = {}
    for key in given:
        name = _underscored(key)
        if name in named:
            raise document.error(f"the same argument as {named[name]!r}", (*place, key))
        named[name] = key
    return {name: given[key] for name, key in named.items()}


def _underscored(key: str) -> str:
    flag, dot, part = key.partition(".")
    return flag.replace("-", "_") + dot + part


def _as_written(document: Document, index: int, place: Place) -> Place:
    """The place in a stage with the key as the file has it."""
    match place:
        case ("engine_args", str(name), *rest):
            given = document.data["stages"][index]["engine_args"]
            return ("engine_args", next(key for key in given if _underscored(key) == name), *rest)
    return place
