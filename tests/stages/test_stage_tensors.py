"""Tensors are frames of their own in both directions, and arrive unchanged on every way."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from tests.stages.heads import Head, open_head, source, stage
from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.vllm_api.codecs.stage_codec import ReceivedTensor

ROWS = 1 << 20
"""Of two float32: 8 MB."""

WITH_THE_SHARED_HEAD = pytest.mark.asyncio(loop_scope="module")

ADD_OF_NO_TENSOR = msgspec.msgpack.encode(("bad", 0, False, True, None, None, ("float32", (3,), b"1234")))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["copied", "shared"])
async def head(request: pytest.FixtureRequest) -> AsyncIterator[Head]:
    """A head with a replica, with or without shared memory; its start imports torch, which takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        async with open_head(stage("torch_classes:Doubling"), share_memory=request.param) as opened:
            yield opened


@pytest.fixture(autouse=True)
def nothing_said_yet(request: pytest.FixtureRequest) -> None:
    if "head" in request.fixturenames:
        request.getfixturevalue("head").outputs.clear()


@WITH_THE_SHARED_HEAD
async def test_large_tensors_are_frames_of_their_own_both_ways(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(2 * ROWS, dtype=torch.float32).view(ROWS, 2)
    request = head.api.build(source(), StageInput(tensor=tensor), {}, for_client=False)
    _, message, frame = head.api.encode_add(request, "a")
    assert (len(message) < 200, memoryview(frame).nbytes) == (True, tensor.nbytes)
    assert torch.frombuffer(frame, dtype=torch.uint8).data_ptr() == tensor.data_ptr()

    received: list[list[int]] = []
    decode = head.api.decode_outputs

    def watched(frames: Any) -> Any:
        received.append([memoryview(frame).nbytes for frame in frames])
        return decode(frames)

    monkeypatch.setattr(head.api, "decode_outputs", watched)
    head.client.add_request(request, "a")
    answer = await head.answer("a")
    assert answer.metadata == {"device": "cpu", "threads": 1, "dtype": "torch.float32"}
    assert torch.equal(answer.tensor, 2 * tensor.T)
    ((message_bytes, tensor_bytes),) = received
    assert (message_bytes < 300, tensor_bytes) == (True, tensor.nbytes)


KINDS = {
    "no dimensions": torch.tensor(3, dtype=torch.int16),
    "nothing in it": torch.empty(0, 5),
    "bfloat16": torch.ones(3, 4, dtype=torch.bfloat16),
    "a view": torch.arange(12.0).view(3, 4)[:, 1:3],
    "a conjugate": torch.full((100, 2), 1j).conj(),
    "with a gradient": torch.ones(300, requires_grad=True),
}


@WITH_THE_SHARED_HEAD
async def test_tensors_of_all_kinds_arrive_as_they_were(head: Head) -> None:
    for name, tensor in KINDS.items():
        head.send(name, StageInput(tensor=tensor))
    for name, tensor in KINDS.items():
        answer = await head.answer(name)
        turned = tensor.T if tensor.ndim == 2 else tensor
        assert (answer.tensor.dtype, answer.tensor.shape) == (tensor.dtype, turned.shape), name
        assert torch.equal(answer.tensor, 2 * turned), name


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        (("float32", (3,), b"12345678"), "8 bytes are not a tensor [3] of float32"),
        (("load", (2,), b"12"), "itemsize"),
        (("nothing", (2,), b"12"), "nothing"),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(encoded: Any, complaint: str) -> None:
    name, shape, data = encoded
    with pytest.raises((ValueError, AttributeError), match=re.escape(complaint)):
        ReceivedTensor(name, list(shape), data).to_torch()


@WITH_THE_SHARED_HEAD
async def test_an_invalid_tensor_fails_its_request_only(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    await head.client.call("pause_scheduler", "keep", False)
    head.send("good", StageInput(tensor=torch.ones(1)))
    with monkeypatch.context() as patch:
        patch.setattr(head.api, "encode_add", lambda request, name, index: (b"\x00", ADD_OF_NO_TENSOR))
        head.send("bad", "")
    await head.client.call("resume_scheduler")
    assert (await head.answer("good")).tensor.tolist() == [2.0]
    error = (await head.answer("bad")).metadata["error"]
    assert error.startswith("Stage 'vocoder': Doubling: TypeError: its input is not a valid tensor")


@WITH_THE_SHARED_HEAD
async def test_a_tensor_that_cannot_be_sent_fails_its_request(head: Head) -> None:
    for request_id in ("sparse", "sparse again"):
        head.send(request_id, "sparse")
        assert (await head.answer(request_id)).metadata["error"].startswith("Stage 'vocoder': Doubling: ")
