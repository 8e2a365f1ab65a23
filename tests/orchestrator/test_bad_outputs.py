"""Messages of a replica that cannot be decoded: the replica is taken out, and its requests go on elsewhere."""

import pytest

from tests.fakes.fleet import FakeFleet


async def begin(fleet: FakeFleet, *request_ids: str) -> None:
    for request_id in request_ids:
        await fleet.submit(request_id, prompt=[1, 2])
        fleet.say(request_id, 11)
    await fleet.read()


@pytest.mark.parametrize("message", [b"garbage", b'{"outputs": [{"request_id": 3}]}'])
async def test_requests_go_on_when_their_replica_sends_what_is_no_message(
    fleet: FakeFleet, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await begin(fleet, "a", "b")
    bad, _ = fleet.attempt("a")
    other, neighbour = fleet.attempt("b")
    assert bad is not other
    bad.say(message)
    assert other.prompts[fleet.attempt("a")[1]] == [1, 2, 11]
    assert fleet.attempt("b") == (other, neighbour)
    for request_id in ("a", "b"):
        other.output(fleet.attempt(request_id)[1], 12, finish_reason="stop")
    assert await fleet.read() == [("a", "stop"), ("b", "stop")]
    assert (fleet.tokens["a"], fleet.tokens["b"]) == ([11, 12], [11, 12])
    name = bad.input_addr.removeprefix("memory://replica-").removesuffix("/in")
    assert f"Replica 0.{name} is lost (it sent an invalid message: " in caplog.text
