"""Transforms: the built-in ones, those of others by their names, and what may come out of them."""

import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.errors import ConfigError, StageError
from vllm_omni_plugin.pipeline import StageInput, StageOutput, Transfer
from vllm_omni_plugin.pipeline.transforms import check_input, resolve_transform

TRANSFER = Transfer("r", "talker")


class Tensor:
    """What of a tensor is looked at."""

    dtype = "float32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.ndim = len(shape)

    def __getitem__(self, key: None) -> "Tensor":
        return Tensor(1, *self.shape)

    def numel(self) -> int:
        return self.shape[0]


def run(name: str, output: StageOutput) -> Any:
    transform = resolve_transform(name)
    assert transform is not None
    return transform({"thinker": output}, TRANSFER)


def test_built_in_transforms_return_the_content_that_they_are_named_after() -> None:
    rows = Tensor(3, 8)
    output = StageOutput(token_ids=[4, 5], text="four five", tensor=rows)
    assert run("tokens", output) == [4, 5]
    assert run("text", output) == "four five"
    assert run("prompt_embeds", output) is rows
    assert run("prompt_embeds", StageOutput(tensor=Tensor(8))).shape == (1, 8)


@pytest.mark.parametrize("name", ["tokens", "text", "prompt_embeds"])
def test_built_in_transforms_return_none_for_an_empty_output(name: str) -> None:
    assert run(name, StageOutput()) is None


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a module of transforms."""
    folder = tmp_path / "acme_pipelines"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "broken.py").write_text("import acme_nowhere")
    (folder / "joins.py").write_text(
        "class Joins:\n    @staticmethod\n    def join(outputs, transfer):\n        return transfer.stage\n"
        "def one(outputs): ...\ndef three(outputs, transfer, more): ...\ndef key(outputs, *, transfer): ...\n"
        "def option(outputs, transfer, more=1): ...\nasync def later(outputs, transfer): ...\nNUMBER = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme_pipelines", "acme_pipelines.joins", "acme_pipelines.broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "acme_pipelines.joins"


def test_a_function_of_a_module_is_found_also_in_a_class(module: str) -> None:
    function = resolve_transform(f"{module}:Joins.join")
    assert function is not None
    assert function({}, TRANSFER) == "talker"
    assert resolve_transform(f"{module}:option") is not None


ELSEWHERE = ": correct the name, or add its folder to PYTHONPATH"
TWO_ARGUMENTS = "must take two arguments, the outputs and a Transfer: "


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme_nothing:join", f"cannot be imported: ModuleNotFoundError: No module named 'acme_nothing'{ELSEWHERE}"),
        (
            "acme_pipelines.broken:join",
            f"cannot be imported: ModuleNotFoundError: No module named 'acme_nowhere'{ELSEWHERE}",
        ),
        ("acme_pipelines.joins:split", "does not exist: acme_pipelines.joins has no split"),
        ("acme_pipelines.joins:Joins.split", "does not exist: acme_pipelines.joins has no Joins.split"),
        ("acme_pipelines.joins:NUMBER", "is no function, but a value of type int"),
        ("acme_pipelines.joins:later", "is asynchronous: write it as a plain function, which may block"),
        ("acme_pipelines.joins:one", f"{TWO_ARGUMENTS}too many positional arguments"),
        ("acme_pipelines.joins:three", f"{TWO_ARGUMENTS}missing a required argument: 'more'"),
        ("acme_pipelines.joins:key", f"{TWO_ARGUMENTS}too many positional arguments"),
    ],
)
@pytest.mark.usefixtures("module")
def test_an_invalid_transform_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_transform(name)
    assert str(raised.value) == f"the transform {name!r} {message}"


def test_shorthands_become_stage_inputs() -> None:
    rows = Tensor(2, 4)
    assert check_input("a b", "talker") == StageInput(text="a b")
    assert check_input([1, 2], "talker") == StageInput(token_ids=[1, 2])
    assert check_input(array("q", [3]), "talker") == StageInput(token_ids=array("q", [3]))
    assert check_input(rows, "talker") == StageInput(tensor=rows)
    assert check_input(None, "talker") is None


NO_TOKENS = "returned token ids that are no sequence of whole numbers from 0 on"


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (7, "returned a value of type int"),
        ({"text": "a"}, "returned a value of type dict"),
        ((token for token in [1]), "returned a value of type generator"),
        (b"abc", NO_TOKENS),
        ([1, -2], NO_TOKENS),
        ([1.0], NO_TOKENS),
        ([True], NO_TOKENS),
        (["a"], NO_TOKENS),
        (StageInput(token_ids={1, 2}), NO_TOKENS),  # type: ignore[arg-type]
        (StageInput(text=b"a"), "returned a value of type bytes as text"),  # type: ignore[arg-type]
        (StageInput(tensor=[1.0]), "returned a value of type list as a tensor"),
        (StageInput(text="a", sampling=[1]), "returned a value of type list as sampling"),  # type: ignore[arg-type]
        (StageInput(text="a", metadata="b"), "returned a value of type str as metadata"),  # type: ignore[arg-type]
        ("", "returned nothing to compute on"),
        ([], "returned nothing to compute on"),
        (Tensor(0, 4), "returned nothing to compute on"),
        (StageInput(), "returned nothing to compute on"),
        (StageInput(sampling={"max_tokens": 1}), "returned nothing to compute on"),
    ],
)
def test_an_invalid_input_is_an_error_that_names_the_stage(returned: Any, fault: str) -> None:
    with pytest.raises(StageError) as raised:
        check_input(returned, "talker")
    assert str(raised.value) == f"Stage 'talker': its transform {fault}."
