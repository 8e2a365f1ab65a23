"""The plain encoder makes the same tokens as vLLM's renderer, or there is none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from vllm.renderers.base import BaseRenderer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import maybe_make_thread_pool
from vllm.tokenizers.hf import get_cached_tokenizer

from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.vllm_api.vllm_stages.stage_prompts import plain_encoder
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

from .stage_models import api, config, model, source

PARAMS = TokenizeParams(max_total_tokens=None)
SPECIAL = "<end>"
TEXTS = st.lists(st.sampled_from(["a", "Ab", " ", "é", "\n", SPECIAL, "\0", "語"]) | st.text(max_size=5)).map("".join)


def as_vllm_has_it(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **settings: Any) -> Any:
    """A byte-level tokenizer with truncation and padding in its file, in vLLM's wrappers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: index for index, letter in enumerate([SPECIAL, *alphabet])}, []))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.TemplateProcessing(single=f"$A {SPECIAL}", special_tokens=[(SPECIAL, 0)])
    library.enable_truncation(max_length=3)
    library.enable_padding(length=8)
    made = kind(tokenizer_object=library, eos_token=SPECIAL, pad_token=SPECIAL, **settings)
    return maybe_make_thread_pool(get_cached_tokenizer(made))


def encoder_of(tokenizer: Any, params: TokenizeParams = PARAMS) -> Callable[[str], list[int]]:
    encode = plain_encoder(tokenizer, params)
    assert encode is not None
    return encode


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_the_encoder_makes_the_same_tokens_as_vllms_tokenizer(special: bool, split: bool) -> None:
    tokenizer = as_vllm_has_it(split_special_tokens=split)
    params = replace(PARAMS, add_special_tokens=special)
    encode = encoder_of(tokenizer, params)

    @given(TEXTS)
    def the_same(text: str) -> None:
        assert encode(text) == tokenizer(text, **params.get_encode_kwargs())["input_ids"]

    the_same()


def test_changes_of_the_tokenizer_do_not_change_the_encoder() -> None:
    tokenizer = as_vllm_has_it()
    encode = encoder_of(tokenizer)
    whole = encode("aaaaaaaa")
    tokenizer._tokenizer.enable_truncation(max_length=2)
    assert encode("aaaaaaaa") == whole
    assert len(whole) == 9


@pytest.mark.parametrize("hook", ["__call__", "_encode_plus", "_switch_to_input_mode", "set_truncation_and_padding"])
def test_a_tokenizer_class_with_hooks_has_no_plain_encoder(hook: str) -> None:
    own = type("Own", (PreTrainedTokenizerFast,), {hook: lambda self, *args, **kwargs: None})
    assert plain_encoder(as_vllm_has_it(own), PARAMS) is None
    below = type("Below", (own,), {})
    assert plain_encoder(as_vllm_has_it(below), PARAMS) is None


@pytest.mark.parametrize(
    "asked",
    [{"do_lower_case": True}, {"truncate_prompt_tokens": 4}, {"pad_prompt_tokens": 4}, {"return_token_offsets": True}],
)
def test_other_tokenize_params_have_no_plain_encoder(asked: dict[str, Any]) -> None:
    assert plain_encoder(as_vllm_has_it(), replace(PARAMS, **asked)) is None


def test_another_tokenizer_has_no_plain_encoder() -> None:
    assert plain_encoder(None, PARAMS) is None
    assert plain_encoder(object(), PARAMS) is None


def ask_nobody(*_: Any) -> Any:
    raise NotImplementedError


def test_a_stage_builds_the_same_requests_with_the_plain_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config(model(tmp_path / "own"))
    texts = ("red", "red blue black", "unheard of")

    def built(**fields: Any) -> list[Any]:
        stage_api = api(own, **fields)
        client = source(cache_salt="salt")
        return [stage_api.build(client, StageInput(text=text), {}, for_client=False) for text in texts]

    by_renderer = built()
    monkeypatch.setattr(BaseRenderer, "_tokenize_prompt", ask_nobody)
    assert built(inputs=("thinker",)) == by_renderer
    with pytest.raises(NotImplementedError):
        built()


def test_the_text_of_a_python_stage_that_answers_keeps_names_of_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_api = api(config(model(tmp_path / "own")))
    monkeypatch.setattr(VllmStageApi, "tokenizer", as_vllm_has_it())
    text = f"After {SPECIAL} all ends."
    assert stage_api.decode(stage_api.encode(text)) == text
