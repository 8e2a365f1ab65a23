"""Arguments of operator calls on the wire."""

from typing import Any

import msgspec
import pytest

from vllm_omni_plugin.coordinator.protocol.call_arguments import ABORT_CLIENT_REQUESTS, FORGET_LORA, decode, encode
from vllm_omni_plugin.coordinator.state.shared_state import SharedState
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.requests.adapter import Adapter

CALLS: list[tuple[Any, ...]] = [
    ("add_lora", Adapter("story", 7, "/loras/story", None, True)),
    ("remove_lora", 7),
    (FORGET_LORA, 2**53),
    (ABORT_CLIENT_REQUESTS, ["cmpl-1-0"]),
    ("pin_lora", 7),
    ("pause_generation", "wait", False),
    ("pause_scheduler", "abort", True),
    ("resume_scheduler",),
    ("sleep", 2, "wait"),
    ("wake_up", None),
    ("wake_up", ["weights", "kv_cache"]),
    ("release_kv_cache_memory",),
    ("set_weight_version", "v1"),
    ("collective_rpc", "update_weights", None, [], {"update_info": {"names": ["w"]}}),
    ("collective_rpc", "check_health", 1.5, [1], {}),
    ("reset_prefix_cache", False, True),
    ("reset_mm_cache",),
    ("reset_encoder_cache",),
    ("profile", True, "prefix", None, 3),
    ("profile", True, None, None, None, {"with_stack": True}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[:2])))
def test_encoded_arguments_decode_to_the_same_arguments(call: tuple[Any, ...]) -> None:
    method, *args = call
    encoded = encode(method, args)
    assert decode(method, msgspec.json.decode(msgspec.json.encode(encoded))) == tuple(args)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call[:2])))
@pytest.mark.parametrize("spoiled", ["one too many", "none", "no list"])
def test_a_call_with_other_arguments_is_refused(call: tuple[Any, ...], spoiled: str) -> None:
    encoded = encode(call[0], call[1:])
    assert encoded is not None
    wrong = {"one too many": [*encoded, 1], "none": [] if encoded else [None], "no list": {"args": encoded}}[spoiled]
    with pytest.raises(WireError, match=f"not arguments of {call[0]}"):
        decode(call[0], wrong)


def test_calls_that_leave_state_can_be_encoded() -> None:
    state = SharedState()
    encoded = {call[0] for call in CALLS}
    leaving = {call[0] for call in CALLS if state.leaves_state(call[0], call[1:])}
    assert leaving == encoded - {
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "profile",
        ABORT_CLIENT_REQUESTS,
    }


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("is_sleeping", ()),
        ("collective_rpc", ("release_late_interaction_query_cache", None, [["q"]], {})),
        ("collective_rpc", (print, None, (), {})),
        ("collective_rpc", ("update_weights", None, [object()], {})),
        ("collective_rpc", ("update_weights", None, ["x" * 200_000], {})),
        ("pause_scheduler", ("nonsense", True)),
        ("sleep", (-1, "abort")),
        ("shutdown", ()),
    ],
)
def test_queries_and_invalid_arguments_are_not_encoded(method: str, args: tuple[Any, ...]) -> None:
    assert encode(method, args) is None
