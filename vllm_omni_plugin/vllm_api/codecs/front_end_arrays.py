"""Which outputs vLLM's Rust front end can read. One that it cannot fails all its requests, and those after them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput

_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


def find_unreadable(outputs: Iterable[EngineCoreOutput]) -> list[tuple[EngineCoreOutput, str]]:
    """The outputs that the front end cannot read, each with the field that it cannot read.

    The decoder has checked types and numbers, see `EngineApi`.
    """
    unreadable = []
    for output in outputs:
        # Most outputs are a token, and nothing else.
        if output.new_logprobs is output.new_prompt_logprobs_tensors is output.pooling_output is None and (
            output.kv_transfer_params is output.ec_transfer_params is None
        ):
            continue
        if field := _unreadable_field(output):
            unreadable.append((output, field))
    return unreadable


def _unreadable_field(output: EngineCoreOutput) -> str:
    """The field that vLLM's Rust program could not read; empty if there is none."""
    if output.new_logprobs is not None and not _are_rows(output.new_logprobs):
        return "new_logprobs"
    if output.new_prompt_logprobs_tensors is not None and not _are_rows(output.new_prompt_logprobs_tensors):
        return "new_prompt_logprobs_tensors"
    # Python stages may send such tensors to each other.
    if output.pooling_output is not None and output.pooling_output.is_complex():
        return "pooling_output"
    for field in ("kv_transfer_params", "ec_transfer_params"):
        if not _is_json(getattr(output, field)):
            return field
    return ""


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _are_rows(rows: Any) -> bool:
    """Whether `LogprobsLists` or `LogprobsTensors` have a row for each token: ids, as many logprobs, and one rank."""
    try:
        ids, logprobs, ranks = (np.asarray(array) for array in rows[:3])
    except (TypeError, ValueError):
        # Types that NumPy does not have, or lists of different lengths.
        return False
    return (
        (ids.dtype in _INTEGERS and ranks.dtype in _INTEGERS and logprobs.dtype == np.float32)
        and (ids.ndim == 2 and ids.shape == logprobs.shape and ranks.shape == ids.shape[:1])
        and (ids.shape[1] > 0 or ids.shape[0] == 0)
        and bool((ids >= 0).all() and (ranks >= 0).all())
        and all(other is None for other in rows[3:])
    )
