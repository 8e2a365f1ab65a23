"""Large tensors go through memory that a head shares with its own stages only."""

import errno
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
import torch

from tests.fakes.conditions import eventually
from tests.fakes.mappings import descriptors, is_shared, mappings
from tests.stages.heads import Head, open_head, stage
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.vllm_api.codecs.stage_codec import StageCodec

LARGE = 30 << 20
"""Bytes; there is room for four of them."""

WITH_THE_SHARED_HEAD = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Head]:
    """A head with a replica; its start imports torch, which takes long."""
    async with open_head(stage("torch_classes:Keeping")) as head:
        # It keeps this one.
        head.send("first", StageInput(tensor=torch.zeros(LARGE, dtype=torch.uint8)))
        await head.answer("first")
        yield head


@pytest.fixture
def head(shared: Head) -> Head:
    """The shared head without outputs; three places are free."""
    shared.outputs.clear()
    return shared


@WITH_THE_SHARED_HEAD
async def test_tensors_are_equal_both_ways_and_their_places_are_used_again(head: Head) -> None:
    for number in range(8):
        tensor = torch.full((LARGE,), number, dtype=torch.uint8)
        head.send(str(number), StageInput(tensor=tensor))
        answer = await head.answer(str(number))
        assert torch.equal(answer.tensor, tensor)
        assert (answer.metadata, is_shared(answer.tensor.data_ptr())) == ({"shared": True}, True)
        del answer
        head.outputs.clear()


@WITH_THE_SHARED_HEAD
async def test_tensors_that_find_no_room_go_through_the_socket(head: Head) -> None:
    await head.client.call("pause_scheduler", "keep", False)
    tensors = {str(number): torch.full((LARGE,), number, dtype=torch.uint8) for number in range(6)}
    for request_id, tensor in tensors.items():
        head.send(request_id, StageInput(tensor=tensor))
    await head.client.call("resume_scheduler")
    answers = {request_id: await head.answer(request_id) for request_id in tensors}
    assert all(torch.equal(answers[request_id].tensor, tensor) for request_id, tensor in tensors.items())
    assert [answer.metadata["shared"] for answer in answers.values()] == [True] * 3 + [False] * 3


@WITH_THE_SHARED_HEAD
async def test_the_inputs_of_aborted_requests_are_given_back(head: Head) -> None:
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    await head.client.call("pause_scheduler", "keep", False)
    for number in range(3):
        head.send(f"aborted {number}", StageInput(tensor=tensor))
    head.client.abort_requests([f"aborted {number}" for number in range(3)])
    await head.client.call("resume_scheduler")
    head.send("a", StageInput(tensor=tensor))
    assert (await head.answer("a")).metadata == {"shared": True}


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.long), True])
async def test_an_output_outlives_its_replica_and_nothing_else_does(killed: bool) -> None:
    # What earlier tests have left in cycles.
    gc.collect()
    others, mapped = len(descriptors()), set(mappings())
    async with open_head(stage("torch_classes:Keeping")) as head:
        tensor = torch.arange(LARGE, dtype=torch.uint8)
        head.send("a", StageInput(tensor=tensor))
        answer = await head.answer("a")
        assert is_shared(answer.tensor.data_ptr())
        head.send("never read", StageInput(tensor=tensor))
        if killed:
            os.kill(head.replica.pid, signal.SIGKILL)
            await eventually(lambda: head.deaths)
    assert torch.equal(answer.tensor, tensor)
    del answer
    head.outputs.clear()
    # What earlier tests have may end meanwhile.
    assert len(descriptors()) <= others
    assert set(mappings()) <= mapped


async def test_without_memory_to_share_tensors_go_through_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    async with open_head(stage("torch_classes:Keeping"), starts=False) as head:
        with caplog.at_level(logging.WARNING):
            await head.start()
        assert "memory cannot be shared" in caplog.text
        head.send("a", StageInput(tensor=torch.ones(LARGE, dtype=torch.uint8)))
        assert (await head.answer("a")).metadata == {"shared": False}


def test_a_reference_outside_the_shared_memory_is_not_a_valid_message() -> None:
    loans = msgspec.msgpack.encode([(1, 0, LARGE)])
    with pytest.raises(WireError):
        StageCodec().decode([b"", loans, b"\x00", b""])
