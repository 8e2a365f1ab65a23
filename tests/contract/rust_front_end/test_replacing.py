"""A front end that is killed, stopped or broken is replaced, and nothing is refused or left."""

import asyncio
import errno
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import FinishReason

from tests.fakes.conditions import eventually
from tests.fakes.free_ports import free_port
from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.integration.rust_front_end.front_end_http import FrontEndHttp
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

from .head import HERE, Head, answers_itself, is_running, started_head

CUT_OFF = (httpx.RemoteProtocolError, httpx.ReadError)
"""Errors of a client whose connection has been accepted."""


@pytest.fixture
async def head(tiny_model: Path, sockets: Path) -> AsyncIterator[Head]:
    async with started_head(tiny_model) as head:
        yield head


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_standby_serves_those_that_wait_and_no_connection_is_refused(head: Head, signum: int) -> None:
    lost = head.ask_later(stream=True)
    [request_id] = await head.requested()
    link, engine_id = head.fleet.run_of(request_id)
    answers_itself(head.fleet)
    os.kill(head.serving, signum)
    answers = await asyncio.gather(*[head.ask() for _ in range(50)], return_exceptions=True)
    with pytest.raises(CUT_OFF):
        await lost
    assert link.aborted == [engine_id]
    # It may have accepted the first ones.
    cut_off = [answer for answer in answers if isinstance(answer, CUT_OFF)]
    served = [answer for answer in answers if isinstance(answer, httpx.Response)]
    assert len(served) + len(cut_off) == len(answers)
    assert {answer.status_code for answer in served} == {200}
    assert (await head.ask()).status_code == 200
    await head.has_standby(3)


async def test_it_does_not_belong_to_an_engine_that_is_spawned_at_the_same_time(
    tiny_model: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLEET_ENGINE, "/proc/1/fd/1000")
    async with started_head(tiny_model) as head:
        # What belongs to an engine is killed when that engine crashes.
        assert not any(FLEET_ENGINE in environment(process) for process in head.processes)


async def test_a_standby_that_ends_is_replaced_at_once(head: Head) -> None:
    answers_itself(head.fleet)
    os.kill(head.processes[-1], signal.SIGKILL)
    await head.has_standby(3)
    os.kill(head.processes[-1], signal.SIGSTOP)
    await head.has_standby(4)
    os.kill(head.processes[0], signal.SIGKILL)
    await head.has_standby(5)
    assert (await head.ask()).status_code == 200


async def test_both_may_end_together(head: Head) -> None:
    answers_itself(head.fleet)
    for process in head.processes:
        os.kill(process, signal.SIGKILL)
    assert (await head.ask()).status_code == 200
    assert len(head.processes) >= 3


PLAYED = """#!{python} -IS
import pathlib, socket, sys, time
server, requests = [
    socket.socket(fileno=int(sys.argv[sys.argv.index(option) + 1])) for option in ("--listen-fd", "--input-listener-fd")
]
kept = [requests.accept()]
folder = pathlib.Path({folder!r})
OK = b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n"
{then}
"""
NOT_WELL = """
client, _ = server.accept()
for answer in (OK, {second}):
    client.recv(100)
    client.sendall(answer)
time.sleep(600)
"""
LATE_ONCE = """
for number in range(1000):
    client, _ = server.accept()
    client.recv(100)
    (folder / f"asked-{number}").touch()
    if number == 1:
        time.sleep(1.2)
    client.sendall(OK)
    client.close()
"""
FULL = """
client, _ = server.accept()
for number in range(1000):
    client.recv(100)
    (folder / f"asked-{number}").touch()
    client.sendall(OK)
"""
"""Accepts one connection, as one that has no more descriptors."""


def played(folder: Path, then: str) -> str:
    """A front end that runs this code once it is connected to the fleet."""
    program = folder / "front_end"
    program.write_text(PLAYED.format(python=sys.executable, folder=str(folder), then=then))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (b"HTTP/1.1 503 so\r\n\r\n", "says that its engine is dead"),
        (b"", "has not answered for 0.2 s"),
    ],
    ids=["503", "silent"],
)
async def test_one_that_is_not_well_is_replaced(
    tiny_model: Path, sockets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, second: bytes, says: str
) -> None:
    binary = played(tmp_path, NOT_WELL.format(second=second))
    async with started_head(tiny_model, binary=binary, probe_timeout=0.2) as head:
        await head.has_standby(3)
        assert says in caplog.text
        assert not is_running(head.processes[0])


async def test_time_in_which_the_head_did_not_run_does_not_count(
    tiny_model: Path, sockets: Path, tmp_path: Path
) -> None:
    async with started_head(tiny_model, binary=played(tmp_path, LATE_ONCE), probe_timeout=0.5) as head:
        await eventually((tmp_path / "asked-1").exists, "the question")
        # As a stopped process, and one without the processor.
        time.sleep(1)  # noqa: ASYNC251
        await eventually((tmp_path / "asked-3").exists, "the next question")
        assert len(head.processes) == 2


async def test_one_that_answers_only_those_whom_it_has_accepted_is_not_replaced(
    tiny_model: Path, sockets: Path, tmp_path: Path
) -> None:
    async with started_head(tiny_model, binary=played(tmp_path, FULL)) as head:
        await eventually((tmp_path / "asked-3").exists, "the next question")
        assert len(head.processes) == 2


async def test_stop_refuses_new_connections_and_lets_requests_finish(head: Head) -> None:
    running = head.ask_later(max_tokens=2)
    [request_id] = await head.requested()
    head.front_end.stop()
    await eventually(partial(is_refused, head.client.base_url.port), "the end of the listening socket")
    assert not head.running.done()
    for reason in (None, FinishReason.LENGTH):
        head.fleet.say(request_id, 3, finish=reason)
    assert (await running).status_code == 200
    await asyncio.wait_for(head.running, 10)
    assert not any(map(is_running, head.processes))


async def test_one_that_is_killed_while_requests_finish_is_not_replaced_and_the_log_says_so(
    head: Head, caplog: pytest.LogCaptureFixture
) -> None:
    running = head.ask_later()
    await head.requested()
    head.front_end.stop()
    os.kill(head.serving, signal.SIGKILL)
    await asyncio.wait_for(head.running, 10)
    with pytest.raises(CUT_OFF):
        await running
    assert "was ended by SIGKILL; its requests are aborted." in caplog.text


async def test_nothing_is_left(tiny_model: Path, sockets: Path) -> None:
    before = os.listdir("/proc/self/fd")
    async with started_head(tiny_model) as head:
        os.kill(head.serving, signal.SIGKILL)
        await head.has_standby(3)
        os.kill(head.processes[-1], signal.SIGKILL)
        await head.has_standby(4)
    assert os.listdir(sockets) == []
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "closed files")


@pytest.mark.parametrize("where", ["Unix socket", "TLS"])
async def test_the_standby_serves_at_the_same_place(
    tiny_model: Path, sockets: Path, certificate: list[str], where: str
) -> None:
    flags = certificate if where == "TLS" else ["--uds", str(sockets / "http")]
    async with started_head(tiny_model, *flags) as head:
        answers_itself(head.fleet)
        os.kill(head.serving, signal.SIGKILL)
        assert (await head.ask()).status_code == 200


async def test_it_is_asked_with_the_certificate_of_the_server_where_clients_need_one(certificate: list[str]) -> None:
    _, key, _, path = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=path)
    context.load_cert_chain(path, key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    listening = socket.create_server((HERE, 0))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*certificate, "--ssl-cert-reqs", "2"])
    async with await asyncio.start_server(answer, sock=listening, ssl=context):
        assert await FrontEndHttp(listening, args).health() == b"HTTP/1.1 200 OK"


async def test_with_grpc(tiny_model: Path, sockets: Path) -> None:
    port = free_port()
    async with started_head(tiny_model, grpc_port=port) as head:
        await eventually(partial(answers_http2, port), "the gRPC server")
        os.kill(head.serving, signal.SIGKILL)
        await head.has_standby(3)
        await eventually(partial(answers_http2, port), "the gRPC server")


def environment(process: int) -> str:
    return Path(f"/proc/{process}/environ").read_text()


def is_refused(port: int | None) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HERE, port)) == errno.ECONNREFUSED


def answers_http2(port: int) -> bool:
    with socket.create_connection((HERE, port), 1) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        client.settimeout(1)
        # A frame of settings.
        return client.recv(9)[3:4] == b"\x04"
