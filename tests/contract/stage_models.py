"""Tiny models with tokenizers that differ in a way one can read, as stages of a pipeline. Nothing is ever loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni_plugin.pipeline import Modality, Stage
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

from .configs import vllm_config, write_model

CONTEXT = 32
WORDS = ("<end>", "<begin>", "<unknown>", "red", "green", "blue", "white", "black", "stop")
"""A vocabulary: the id of a word is its index. Prompts begin with `<begin>`."""
REVERSED = (*WORDS[:3], *WORDS[:2:-1])
"""The same words under other ids."""


def model(folder: Path, words: Sequence[str] = WORDS, **config: Any) -> Path:
    """A model's folder with a tokenizer of whole words."""
    write_model(folder, bos_token_id=1, eos_token_id=0, **config)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)
    return folder


def config(folder: Path, **arguments: Any) -> Any:
    """vLLM's configuration of a model's folder, with a context of `CONTEXT` tokens."""
    return vllm_config(folder, **{"max_model_len": CONTEXT, "skip_tokenizer_init": False, **arguments})


def stage(**fields: Any) -> Stage:
    given: dict[str, Any] = {"output": Modality.TEXT, "model": "m"}
    return Stage(id=1, name="refiner", engine="vllm", **given | fields)


def api(own: Any, entry: Any = None, **fields: Any) -> VllmStageApi:
    """The API of a stage; by default it is the entry stage."""
    return VllmStageApi(own, own if entry is None else entry, stage(**fields))


def source(prompt: Sequence[int] = (1, 3, 4), params: Any = None, **fields: Any) -> EngineCoreRequest:
    """A client's request as from vLLM's input processing."""
    sampling = params if isinstance(params, SamplingParams) or params is None else None
    given: dict[str, Any] = {
        "request_id": "r-1",
        "prompt_token_ids": list(prompt),
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=5) if params is None else sampling,
        "pooling_params": params if sampling is None and params is not None else None,
        "arrival_time": 7.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "external_req_id": "r",
    }
    return EngineCoreRequest(**given | fields)
