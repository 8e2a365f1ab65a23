"""An answer in the tokens of another model is detokenized with that model's tokenizer."""

import time
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_omni_plugin.integration.core_client.fleet_events import decode_with

from .stage_models import source

HALF_A_CHARACTER = "â"
"""How a byte-level vocabulary writes the first byte of several characters."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are bytes."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def request(prompt: Sequence[int], detokenize: bool = True, resumable: bool = False) -> EngineCoreRequest:
    params = SamplingParams(detokenize=detokenize, output_kind=RequestOutputKind.FINAL_ONLY)
    return source(prompt, params, request_id="a", resumable=resumable)


def answer(processor: OutputProcessor, tokens: Sequence[int]) -> str:
    """The text of an answer that ends with these tokens."""
    queue = processor.request_states["a"].queue
    assert queue is not None
    output = EngineCoreOutput("a", list(tokens), finish_reason=FinishReason.LENGTH)
    processor.process_outputs([output], time.monotonic(), None)
    return str(queue.get_nowait().outputs[0].text)


def add(processor: OutputProcessor, added: EngineCoreRequest) -> None:
    processor.add_request(added, None, None, 0, RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "a"))


@pytest.fixture
def processor(tokenizer: PreTrainedTokenizerFast) -> OutputProcessor:
    processor = OutputProcessor(None, log_stats=False)
    decode_with(processor, tokenizer)
    return processor


def test_prompt_tokens_of_another_model_do_not_change_the_answer(
    processor: OutputProcessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    add(processor, request([tokenizer.convert_tokens_to_ids(HALF_A_CHARACTER)]))
    assert answer(processor, tokenizer.encode(" good")) == " good"


def test_a_further_chunk_of_a_session_does_not_restart_the_answer(processor: OutputProcessor) -> None:
    add(processor, request([1], resumable=True))
    before = processor.request_states["a"].detokenizer
    add(processor, request([2], resumable=True))
    assert processor.request_states["a"].detokenizer is before
