"""The pages on pipelines match the code: the example loads, the table has every key, the transforms work."""

import doctest
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, Stage, load_pipeline
from vllm_omni_plugin.pipeline.loading import schema

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipelines.md").read_text()
TRANSFORMS_PAGE = (DOCS / "how-to" / "write-a-transform.md").read_text()


def block(page: str, language: str) -> str:
    """The first block of this language on a page."""
    found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1]


def test_the_error_shown_is_the_one_of_a_slip_in_the_example(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(block(PAGE, "yaml").replace("[thinker]", "[thinkr]"))
    with pytest.raises(ConfigError) as raised:
        load_pipeline(file)
    assert f"\n{str(raised.value).replace(f'{tmp_path}/', '')}\n" in PAGE


def test_the_table_has_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE))
    for field in fields(Stage):
        default = schema()["$defs"]["stage"]["properties"][field.name].get("default")
        if default in (None, [], {}):
            assert rows[field.name].split(",")[0] in {"required", "required with `vllm`", "none", "what fits"}
        else:
            assert rows[field.name].strip("`") == str(default).lower()


def test_the_transforms_on_the_page_do_what_it_says() -> None:
    names: dict[str, Any] = {}
    exec(block(TRANSFORMS_PAGE, "python"), names)
    examples = doctest.DocTestParser().get_doctest(block(TRANSFORMS_PAGE, "pycon"), names, "page", None, None)
    assert len(examples.examples) > 3
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_the_page_names_every_modality_and_built_in_transform() -> None:
    assert [name for name in [*Modality, *BuiltInTransform] if f"`{name}`" not in PAGE] == []
