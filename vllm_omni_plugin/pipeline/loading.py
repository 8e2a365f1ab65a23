"""Loads and checks the YAML file of a pipeline."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.documents import Document, Place, read, validate
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Modality, PipelineError, Stage

_WHOLE_NUMBERS = ("id", "replicas", "chunk_size", "min_prompt_tokens")


StageCheck = Callable[[Pipeline, Stage], None]
"""An additional check of one stage. Raises PipelineError with the place in that stage."""


_OUT_OF_PLACE = {
    "options": "only a Python engine has options; vLLM's has 'engine_args'",
    "model": "only for engine: vllm; a Python engine has 'options'",
    "engine_args": "only for engine: vllm; a Python engine has 'options'",
    "chunk_size": "only with async_chunk: true",
    "min_prompt_tokens": "only with output: kv_cache",
}
"""Messages for keys that other keys of the stage exclude."""


@cache
def schema() -> Mapping[str, Any]:
    """The JSON Schema (2020-12) of a pipeline's file."""
    text = files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    return MappingProxyType(json.loads(text))


def load_pipeline(path: str | os.PathLike[str], checks: Iterable[StageCheck] = ()) -> Pipeline:
    """Load and check a pipeline's file, which `schema.json` and docs/pipelines.md describe.

    `checks` are additional ones of each stage, in this order. ConfigError: one line that names file, line and key.
    """
    document = read(Path(path))
    validate(document, schema(), _OUT_OF_PLACE)
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


def _stage(document: Document, index: int, given: dict[str, Any]) -> Stage:
    engine_args = _engine_args(document, ("stages", index, "engine_args"), given.get("engine_args", {}))
    typed: dict[str, Any] = {
        "engine_args": engine_args,
        "inputs": tuple(given.get("inputs", ())),
        "output": Modality(given["output"]),
    }
    # For JSON Schema 1.0 is an integer.
    numbers: dict[str, Any] = {key: int(given[key]) for key in _WHOLE_NUMBERS if key in given}
    return Stage(**given | typed | numbers)


def _engine_args(document: Document, place: Place, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with underscores in their names, except after a dot, where a part of the value is named."""
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
    """The place, with the key as written in the file."""
    match place:
        case ("engine_args", str(name), *rest):
            given = document.data["stages"][index]["engine_args"]
            return ("engine_args", next(key for key in given if _underscored(key) == name), *rest)
    return place
