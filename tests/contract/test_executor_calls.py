"""The methods that vLLM's executors call on workers exist in our executor without a model."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.executor import abstract, uniproc_executor
from vllm.v1.worker.worker_base import WorkerBase

from tests.fakes.sleeping_executor import Worker

CALLED = set(
    re.findall(r'collective_rpc\(\s*"(\w+)"', inspect.getsource(abstract) + inspect.getsource(uniproc_executor))
)
OURS = {name: member for name, member in vars(Worker).items() if inspect.isfunction(member)}


def parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())[1:]


def test_the_calls_are_found() -> None:
    assert {"set_kv_cache_layout", "determine_available_memory", "execute_model"} <= CALLED


@pytest.mark.parametrize("name", sorted(CALLED & OURS.keys() & vars(WorkerBase).keys()))
def test_our_worker_takes_what_vllms_is_given(name: str) -> None:
    theirs = parameters(getattr(WorkerBase, name))
    inspect.signature(OURS[name]).bind(None, *theirs)
