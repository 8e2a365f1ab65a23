"""Bad input on a live coordinator is counted and dropped, and does not affect other peers."""

import random
from collections import Counter

import pytest
from coordinator_support import BAD_FRAMES, OpenDealer, eventually, make_event, names

from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordClientForStage,
    OmniCoordinator,
    ReplicaStatus,
    encode_event,
)
from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason


def test_oversized_frame_ends_only_its_own_connection(coordinator: OmniCoordinator, dealer: OpenDealer) -> None:
    neighbour = dealer(coordinator.router_zmq_addr)
    neighbour.send(encode_event(make_event("neighbour", queue_length=1)))
    eventually(lambda: names(coordinator.get_active_replicas()) == ["neighbour"])
    flooder = dealer(coordinator.router_zmq_addr)
    flooder.send(b"x" * 10_000_000)
    flooder.send(encode_event(make_event("reconnected")))
    eventually(lambda: names(coordinator.get_active_replicas()) == ["neighbour", "reconnected"])
    # Cut at the socket: had the frame come through, it would have been counted.
    assert coordinator.invalid_frames["malformed"] == 0
    neighbour.send(encode_event(make_event("neighbour", queue_length=2)))
    eventually(lambda: coordinator.get_active_replicas().replicas[0].queue_length == 2)


def random_message(rng: random.Random) -> tuple[list[bytes], str]:
    """Return one message and what becomes of it: a drop reason, or "event" for what depends on the table."""
    choice = rng.randrange(8)
    event = make_event(
        f"x{rng.randrange(300)}",
        stage_id=rng.randrange(8),
        status=rng.choice(list(ReplicaStatus)),
        queue_length=rng.randrange(2**31),
        incarnation=rng.randrange(4),
        sequence=rng.randrange(50),
    )
    frame = encode_event(event)
    if choice < 3:
        return [frame], "event"
    if choice == 3:
        return [frame[: rng.randrange(len(frame))]], "malformed"
    if choice == 4:
        return [b"\xff" + rng.randbytes(rng.randrange(200))], "malformed"
    if choice == 5:
        return [frame] * rng.randrange(2, 5), "multipart"
    if choice == 6:
        replay = make_event("neighbour", status=ReplicaStatus.DOWN, incarnation=rng.randrange(9), sequence=9**9)
        return [encode_event(replay)], "stale"
    return [rng.choice(BAD_FRAMES)], "malformed"


@pytest.mark.parametrize("frames", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_random_frames_harm_neither_service_nor_neighbour(
    coordinator: OmniCoordinator, hub: OmniCoordClientForHub, dealer: OpenDealer, frames: int
) -> None:
    neighbour = OmniCoordClientForStage(coordinator.router_zmq_addr, "tcp://neighbour:1", "tcp://neighbour:2", 0)
    neighbour.update_info(queue_length=7)
    eventually(lambda: [info.queue_length for info in coordinator.get_active_replicas().replicas] == [7])
    (before,) = coordinator.get_active_replicas().replicas

    rng = random.Random(20261101)
    variety = [random_message(rng) for _ in range(frames // 5)]
    peers = [dealer(coordinator.router_zmq_addr) for _ in range(4)]
    sent: Counter[str] = Counter()
    for _ in range(frames):
        parts, outcome = rng.choice(variety)
        rng.choice(peers).send_multipart(parts)
        sent[outcome] += 1
    for number, peer in enumerate(peers):
        peer.send(encode_event(make_event(f"last{number}")))

    last = {f"last{number}" for number in range(len(peers))}
    eventually(lambda: last <= set(names(coordinator.get_active_replicas())), within=60)
    counts = coordinator.invalid_frames
    assert (counts["malformed"], counts["multipart"], counts["table-full"]) == (sent["malformed"], sent["multipart"], 0)
    assert sent["stale"] <= counts["stale"] <= sent["stale"] + sent["event"]

    (after,) = [info for info in coordinator.get_active_replicas().replicas if info.input_addr == before.input_addr]
    assert (after.status, after.queue_length, after.stage_id) == (before.status, 7, 0)
    assert after.registered_at == pytest.approx(before.registered_at, abs=0.5)
    neighbour.update_info(queue_length=8)
    eventually(lambda: any(info.queue_length == 8 for info in hub.get_replicas_for_stage(0).replicas))
    neighbour.close()
    eventually(lambda: "neighbour" not in names(hub.get_replica_list()))


def test_peer_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog()
    for _ in range(5):
        drops.record(DropReason.STALE, "10.0.0.1", "old")
        drops.record(DropReason.MALFORMED, "10.0.0.1", "bad")
    assert len(caplog.records) == 2
    assert caplog.text.count("'10.0.0.1'") == 2
    assert caplog.text.count("(stale)") == caplog.text.count("(malformed)") == 1


def test_number_of_logged_peers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog(max_peers=3)
    for number in range(100):
        drops.record(DropReason.MALFORMED, f"peer{number}", "bad")
    assert len(caplog.records) == 4
    assert drops.counts["malformed"] == 100


def test_frame_content_cannot_break_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    DropLog().record(DropReason.MALFORMED, "10.0.0.1", "bad\nERROR forged line")
    assert "\n" not in caplog.text.rstrip("\n")
