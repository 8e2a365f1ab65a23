"""The control wire: what is encoded comes back, also of versions before this one, and anything else is a WireError."""

import json
from itertools import chain
from typing import Any

import msgspec
import pytest
from coordinator_support import BAD_FRAMES, make_event
from hypothesis import example, given
from hypothesis import strategies as st

from tools.wire_frames import FOLDER, READERS, lines_of
from vllm_omni_plugin.coordinator import (
    ReplicaEvent,
    ReplicaInfo,
    ReplicaList,
    ReplicaStatus,
    decode_event,
    decode_replica_list,
    encode_event,
    encode_replica_list,
    generation_of,
)
from vllm_omni_plugin.coordinator.protocol.control_messages import MAX_ADDRESS_CHARS, MAX_QUEUE_LENGTH, MAX_STAGE_ID
from vllm_omni_plugin.coordinator.protocol.fleet_state import FleetState, StageState
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    FleetCall,
    decode_from_head,
    decode_to_head,
    encode_from_head,
    encode_to_head,
    frames_to_head,
)
from vllm_omni_plugin.coordinator.state.membership_table import DEFAULT_MAX_REPLICAS
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import printable
from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, decode_from_server, decode_to_server
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

PLAIN = {
    "input_addr": "tcp://a:1",
    "output_addr": "tcp://a:2",
    "stage_id": 0,
    "event_type": "update",
    "status": "up",
    "queue_length": 0,
}
INFO = ReplicaInfo("tcp://a:1", "tcp://a:2", 3, ReplicaStatus.UP, 4, 5.0, 6.0)

# A character that JSON writes with six.
LONGEST_ADDRESS = "\x01" * MAX_ADDRESS_CHARS

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(PLAIN)) | st.text(), inner),
    max_leaves=8,
)
events = st.builds(
    make_event,
    st.text(st.characters(codec="utf-8"), max_size=100).map(printable),
    stage_id=st.integers(0, 1023),
    status=st.sampled_from(ReplicaStatus),
    queue_length=st.integers(0, 2**31 - 1),
    incarnation=st.integers(0, 2**63 - 1),
    sequence=st.integers(0, 2**63 - 1),
)


def frame_with(**fields: Any) -> bytes:
    return json.dumps({**PLAIN, **fields}).encode()


@pytest.mark.parametrize("sent", ["\n", "\x1b[2J", "\x7f", "\x9b", "\u2028", "\u202e", "\x00"])
@pytest.mark.parametrize("escaped", [True, False])
def test_no_peer_puts_a_control_character_into_logs_or_a_page(sent: str, escaped: bool) -> None:
    host = json.dumps(f'"{sent}é', ensure_ascii=escaped)
    event = decode_event(frame_with(host_slot="HOST").replace(b'"HOST"', host.encode()))
    assert event.host_slot.isprintable()
    assert (event.host_slot[0], event.host_slot[-1]) == ('"', "é")
    with pytest.raises(WireError) as invalid:
        decode_event(frame_with(status="STATUS").replace(b'"STATUS"', host.encode()))
    assert str(invalid.value).isprintable()
    refused = decode_from_server(json.dumps({"type": "refused", "reason": sent, "lasting": True}).encode())
    assert refused.reason.isprintable()
    report = {"type": "machine_report", "rank": 1, "process": 1, "address": "", "setup": {sent: sent}}
    told = decode_to_server(json.dumps(report, ensure_ascii=escaped).encode())
    assert isinstance(told, MachineReport)
    assert all(text.isprintable() for text in chain(*told.setup.items()))


def test_what_operator_calls_give_to_engines_arrives_as_it_is() -> None:
    call = FleetCall(1, "collective_rpc", ["f", None, ["a\nb"], {"c": "\x1b"}], [0])
    assert decode_from_head(encode_from_head(call)) == call
    document = FleetState(1, "head", (StageState((Adapter("a\u3000b", 1, "/a\u200db"),), weight_version="\u3000"),))
    assert decode_from_head(encode_from_head(document)) == document
    assert decode_to_head(next(frames_to_head([encode_to_head(document)]))) == [document]


def test_largest_list_is_below_the_size_limit() -> None:
    info = ReplicaInfo(
        LONGEST_ADDRESS,
        LONGEST_ADDRESS,
        MAX_STAGE_ID,
        ReplicaStatus.DRAINING,
        MAX_QUEUE_LENGTH,
        1.7976931348623157e308,
        1.7976931348623157e308,
        2**63 - 1,
        LONGEST_ADDRESS,
    )
    frame = encode_replica_list(ReplicaList([info] * DEFAULT_MAX_REPLICAS, 1.7976931348623157e308))
    assert len(decode_replica_list(frame).replicas) == DEFAULT_MAX_REPLICAS


def test_replica_list_is_one_json_map_with_replicas_and_timestamp() -> None:
    frame = json.loads(encode_replica_list(ReplicaList([INFO], 7.5)))
    assert frame["timestamp"] == 7.5
    assert frame["replicas"] == [
        {
            "input_addr": "tcp://a:1",
            "output_addr": "tcp://a:2",
            "stage_id": 3,
            "status": "up",
            "queue_length": 4,
            "last_heartbeat": 5.0,
            "registered_at": 6.0,
            "incarnation": 0,
            "control_addr": "",
            "replica_id": -1,
            "in_use": None,
        }
    ]


def test_missing_optional_keys_and_unknown_keys_are_accepted() -> None:
    assert decode_replica_list(b'{"replicas":[],"timestamp":1.5}') == ReplicaList([], 1.5)
    assert decode_event(frame_with(colour="blue")) == make_event()


@given(events)
def test_event_survives_the_wire(event: ReplicaEvent) -> None:
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_length", -1),
        ("queue_length", 2**31),
        ("queue_length", 10**400),
        ("queue_length", None),
        ("stage_id", -1),
        ("stage_id", 1024),
        ("input_addr", ""),
        ("input_addr", "x" * 257),
        ("status", "sleepy"),
        ("event_type", "rumour"),
        ("incarnation", -1),
        ("sequence", 2**63),
    ],
)
def test_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(WireError, match=field):
        decode_event(frame_with(**{field: value}))


@pytest.mark.parametrize("field", sorted(PLAIN))
def test_missing_field_is_named(field: str) -> None:
    frame = json.dumps({key: value for key, value in PLAIN.items() if key != field}).encode()
    with pytest.raises(WireError, match=field):
        decode_event(frame)


@pytest.mark.parametrize(
    "frame", [*BAD_FRAMES, b"\x00" * 10_000_000], ids=lambda frame: f"{frame[:12]!r}({len(frame)})"
)
def test_frame_that_is_no_event_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError, match="replica event"):
        decode_event(frame)


def test_error_text_does_not_grow_with_what_was_sent() -> None:
    with pytest.raises(WireError) as caught:
        decode_event(frame_with(status="x" * 50_000))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "frame", [b"", b"[]", b'{"replicas":5,"timestamp":1}', b'{"replicas":[{}],"timestamp":1}', b"\xff"]
)
def test_frame_that_is_no_list_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError, match="replica list"):
        decode_replica_list(frame)


@pytest.mark.parametrize(
    "event",
    [
        make_event(queue_length=-1),
        make_event(stage_id=5000),
        make_event("x" * 300),
        make_event(queue_length=object()),  # type: ignore[arg-type]
    ],
)
def test_event_that_would_be_refused_is_not_encoded(event: ReplicaEvent) -> None:
    with pytest.raises(WireError, match="replica event"):
        encode_event(event)


@given(st.binary(max_size=2000) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b'{"input_addr":"\\ud800"')
def test_arbitrary_frames_raise_nothing_but_wire_errors(frame: bytes) -> None:
    for decode in (decode_event, decode_replica_list):
        try:
            decoded = decode(frame)
        except WireError:
            continue
        assert isinstance(decoded, ReplicaEvent | ReplicaList)


RECORDED = [
    pytest.param(*line.split(": ", 1), id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.txt"))
    for number, line in enumerate(file.read_text().splitlines())
]
GENERATION = FOLDER / "generation-of-0.2.txt"
"""What a node is told of two stages, one of them in Python, and the `Hello` of a head that has them."""


def is_in(said: Any, read: Any) -> bool:
    """Whether what was read has all that was said; it may have more keys."""
    if isinstance(said, dict):
        return isinstance(read, dict) and all(key in read and is_in(value, read[key]) for key, value in said.items())
    if isinstance(said, list):
        return isinstance(read, list) and len(said) <= len(read) and all(map(is_in, said, read))
    return bool(said == read)


@pytest.mark.parametrize(("direction", "frame"), RECORDED)
def test_a_frame_of_a_version_before_is_read_with_all_that_it_says(direction: str, frame: str) -> None:
    reader, _ = READERS[direction]
    assert is_in(json.loads(frame), msgspec.json.decode(msgspec.json.encode(reader(frame.encode()))))


@pytest.mark.parametrize("later", [{}, {"a field that later versions compare": "x"}])
def test_heads_of_other_versions_of_this_plugin_are_of_the_same_generation(later: dict[str, str]) -> None:
    *stages, hello = (line.split(": ", 1) for line in GENERATION.read_text().splitlines())
    fingerprints = [READERS[direction][0](frame.encode())[0].fingerprint for direction, frame in stages]
    (head,) = [READERS[hello[0]][0](hello[1].encode())]
    assert generation_of({stage: fields | later for stage, fields in enumerate(fingerprints)}) == head.generation
    assert len({generation_of({0: fingerprints[0] | {name: "other"}}) for name in fingerprints[0]}) == 22


def test_this_version_can_be_recorded_for_later_ones() -> None:
    for line in lines_of():
        direction, frame = line.split(": ", 1)
        assert READERS[direction][0](frame.encode())
