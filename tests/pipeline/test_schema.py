"""The schema that editors and other tools read, against the classes that the plugin reads files into."""

from dataclasses import MISSING, fields
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from vllm_omni_plugin.pipeline import BuiltInTransform, Stage
from vllm_omni_plugin.pipeline.loading import schema

STAGE: Any = schema()["$defs"]["stage"]
PROPERTIES: Any = STAGE["properties"]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(dict(schema()))


def test_the_schema_has_and_requires_the_keys_of_a_stage() -> None:
    assert set(PROPERTIES) == {field.name for field in fields(Stage)}
    required = {field.name for field in fields(Stage) if field.default is MISSING and field.default_factory is MISSING}
    assert set(STAGE["required"]) == required


@pytest.mark.parametrize("transform", BuiltInTransform)
def test_the_schema_allows_and_names_every_built_in_transform(transform: str) -> None:
    assert Draft202012Validator(PROPERTIES["transform"]).is_valid(str(transform))
    assert transform in PROPERTIES["transform"]["description"]


def test_every_key_says_what_it_is_for() -> None:
    assert [key for key, value in PROPERTIES.items() if not value.get("description")] == []
