"""No frames of a peer harm a stage."""

import random

import msgspec
from vllm.v1.serial_utils import MsgpackEncoder

from tests.fakes.hostile_frames import hostile_message
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.codecs.stage_codec import StageCodec
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest

MESSAGES = 20_000


def test_an_invalid_message_raises_wire_error_only() -> None:
    rng = random.Random(5)
    side = StageCodec()
    request = StageRequest("a", token_ids=[1, 2], tensor=("float32", (1,), b"1234"), metadata={"a": [1.5, None]})
    samples = [
        MsgpackEncoder().encode(request)[0],
        msgspec.msgpack.encode(["a", "b"]),
        msgspec.msgpack.encode((0, 1, "sleep", (1, "abort"))),
        b"\x91" * 100_000,
    ]
    understood = 0
    for _ in range(MESSAGES):
        frames = [rng.choice((b"\x00", b"\x01", b"\x03")), *hostile_message(rng, samples)]
        try:
            side.decode(frames)
            understood += 1
        except WireError:
            pass
    assert 0 < understood < MESSAGES
