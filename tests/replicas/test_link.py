"""The link to an engine on this node, over real sockets."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.fakes.engines import connect
from tests.fakes.keeping import Keep
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.link import IpcLink

IDENTITY = b"\x00\x00"


class Ends:
    """Both ends of a link, and the messages that were read."""

    def __init__(self, folder: Path) -> None:
        self.link = IpcLink(f"ipc://{folder}/in", f"ipc://{folder}/out", IDENTITY)
        self.requests, self.outputs = connect(self.link.input_addr, self.link.output_addr, IDENTITY)
        self.read: list[bytes] = []

    def on_message(self, frames: list[Any]) -> None:
        self.read.append(bytes(frames[0]))

    def send_numbers(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.outputs.send(b"%d" % number)

    def expected(self, last: int) -> list[bytes]:
        return [b"%d" % number for number in range(last)]

    def close(self) -> None:
        self.link.close()
        self.requests.close()
        self.outputs.close()


@pytest.fixture
def ends(tmp_path: Path, keep: Keep) -> Ends:
    return keep(Ends(tmp_path))


async def test_sending_to_an_engine_that_never_connected_is_an_error(tmp_path: Path, keep: Keep) -> None:
    link = keep(IpcLink(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", IDENTITY))
    with pytest.raises(ReplicaError, match="cannot send on ipc://"):
        link.send((b"kind", b"body"))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 1000])
async def test_a_burst_arrives_whole_and_in_order(ends: Ends, count: int) -> None:
    ends.send_numbers(0, count // 2)
    ends.link.start_reading(ends.on_message)
    ends.send_numbers(count // 2, count)
    await eventually(lambda: len(ends.read) == count)
    assert ends.read == ends.expected(count)


async def test_other_callbacks_run_during_a_burst(ends: Ends) -> None:
    ends.send_numbers(0, 1000)
    seen_between: list[int] = []

    def on_message(frames: list[Any]) -> None:
        ends.on_message(frames)
        if len(ends.read) == 1:
            asyncio.get_running_loop().call_soon(lambda: seen_between.append(len(ends.read)))

    ends.link.start_reading(on_message)
    await eventually(lambda: len(ends.read) == 1000)
    assert seen_between[0] < 1000


async def test_an_error_in_handling_a_message_does_not_stop_reading(ends: Ends) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def on_message(frames: list[Any]) -> None:
        ends.on_message(frames)
        if len(ends.read) == 999:
            raise KeyError("a fault of ours")

    ends.send_numbers(0, 1000)
    ends.link.start_reading(on_message)
    await eventually(lambda: len(ends.read) == 1000)
    assert len(reported) == 1


async def test_a_pause_within_a_burst_stops_at_once_and_loses_nothing(ends: Ends) -> None:
    def on_message(frames: list[Any]) -> None:
        ends.on_message(frames)
        if len(ends.read) == 10:
            ends.link.pause_reading()

    ends.send_numbers(0, 300)
    ends.link.start_reading(on_message)
    await eventually(lambda: len(ends.read) == 10)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(ends.read) == 10
    ends.link.pause_reading()
    ends.link.resume_reading()
    ends.link.resume_reading()
    await eventually(lambda: len(ends.read) == 300)
    assert ends.read == ends.expected(300)


async def test_drain_reads_while_paused(ends: Ends) -> None:
    ends.link.start_reading(ends.on_message)
    ends.link.pause_reading()
    ends.send_numbers(0, 150)

    def all_drained() -> bool:
        ends.link.drain()
        return len(ends.read) == 150

    await eventually(all_drained)
    assert ends.read == ends.expected(150)


async def test_close_is_idempotent_and_ends_reading_and_sending(ends: Ends) -> None:
    ends.link.start_reading(ends.on_message)
    ends.link.close()
    ends.link.close()
    ends.send_numbers(0, 5)
    ends.link.drain()
    ends.link.pause_reading()
    ends.link.resume_reading()
    with pytest.raises(ReplicaError, match="cannot send"):
        ends.link.send((b"kind", b"body"))
    assert ends.read == []


async def test_an_address_that_cannot_be_bound_is_an_error_and_frees_the_other(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    with pytest.raises(zmq.ZMQError):
        IpcLink(address, f"ipc://{tmp_path}/no/such/folder", IDENTITY)
    IpcLink(address, f"ipc://{tmp_path}/out", IDENTITY).close()


async def test_outputs_that_are_not_read_stay_in_the_engine(ends: Ends) -> None:
    ends.outputs.setsockopt(zmq.SNDHWM, 1)
    ends.outputs.setsockopt(zmq.SNDTIMEO, 200)
    # The limit counts for connections made after it was set.
    ends.outputs.disconnect(ends.link.output_addr)
    ends.outputs.connect(ends.link.output_addr)
    sent = 0
    with suppress(zmq.Again):
        while sent < 20_000:
            ends.outputs.send(bytes(2000))
            sent += 1
    assert sent < 10_000
    ends.link.start_reading(ends.on_message)
    await eventually(lambda: len(ends.read) == sent)
