"""The operators' HTTP server behind vLLM's Rust front end, over sockets, and a fleet whose replicas the test plays."""

import asyncio
import os
import re
import signal
import socket
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import httpx
import pytest
from prometheus_client import REGISTRY
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from tests.contract.configs import vllm_config, write_model
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from tests.fakes.free_ports import free_port
from vllm_omni_plugin.admin.admin_keys import find_head, find_local_key
from vllm_omni_plugin.admin.operator_actions import DRAINING, HeadDrain
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import SHUTTING_DOWN, ConfigError
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.integration.rust_front_end.admin_server import AdminServer
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

KEY = "an-admin-key-of-the-operator"
HERE = "127.0.0.1"


class Fleet(FakeFleet):
    """A fleet of one model."""

    stages = FleetStages(None, [None])


@dataclass
class Head:
    """The server of a head, and a client on its machine without a key.

    Attributes:
        ending: whether the head shuts down.
    """

    fleet: Fleet
    args: Namespace
    server: AdminServer
    drain: HeadDrain
    port: int
    admin_port: int
    client: httpx.AsyncClient
    ending: bool = False

    async def status(self, path: str, method: str = "GET", key: str = "", **more: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return (await self.client.request(method, path, headers=headers, **more)).status_code

    async def health(self) -> tuple[int, str]:
        answer = await self.client.get("/health")
        return answer.status_code, answer.text.rstrip("\n")

    async def error(self, path: str) -> tuple[int, str]:
        answer = await self.client.get(path)
        return answer.status_code, answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return vllm_config(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    unregister_vllm_metrics()


Start = Callable[..., AbstractAsyncContextManager[Head]]


@pytest.fixture
def start(config: Any) -> Start:
    @asynccontextmanager
    async def start(*arguments: str, fleet: Fleet | None = None, scheme: str = "http") -> AsyncIterator[Head]:
        """A head with these arguments of `vllm serve`."""
        port, admin_port = free_port(), free_port()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["tiny", "--port", str(port), *arguments])
        args.model = "tiny"
        options = OmniConfig(
            admin_port=admin_port, admin_key_file=args.omni_admin_key_file, admission=args.omni_admission
        )
        async with (
            fleet or Fleet(replicas=2) as served,
            httpx.AsyncClient(base_url=f"{scheme}://{HERE}:{admin_port}", verify=False) as client,
        ):
            drain = HeadDrain(served.orchestrator.events)
            server = AdminServer(
                served,
                args,
                options,
                config,
                drain=drain,
                is_starting=lambda: False,
                is_ending=lambda: head.ending,
                adapters=lambda: {"adapter"},
            )
            head = Head(served, args, server, drain, port, admin_port, client)
            await server.start()
            try:
                yield head
            finally:
                async with asyncio.timeout(10):
                    await server.close()

    return start


async def test_it_is_ready_while_the_head_takes_requests(start: Start) -> None:
    async with start() as head:
        assert await head.status("/health") == 200
        for replica in range(2):
            head.fleet.kill(replica)
        status, reason = await head.health()
        assert (status, reason.startswith("No replica of stage 0 can serve right now")) == (503, True)
        head.fleet.join(head.fleet.pool.member(0))
        assert await head.status("/health") == 200
        head.drain.begin()
        assert await head.health() == (503, DRAINING)
        head.ending = True
        assert await head.health() == (503, SHUTTING_DOWN)


async def test_operators_see_and_change_the_fleet_with_the_key_of_their_user(start: Start) -> None:
    async with start() as head:
        key = find_local_key(HERE, head.admin_port)
        assert key is not None
        assert find_head(HERE, head.port) == (key, f"http://{HERE}:{head.admin_port}")
        assert await head.status("/omni") == 200
        replicas = (await head.client.get("/omni/replicas")).json()["replicas"]
        assert [replica["id"] for replica in replicas] == ["0.0", "0.1"]
        assert await head.status("/omni/replicas/0.0/drain", "POST") == 403
        assert await head.status("/omni/replicas/0.0/drain", "POST", key) == 204
        assert head.fleet.pool.member(0).cordons == {"admin"}
        assert await head.error("/omni/nothing") == (404, "Not Found")
        assert await head.status("/omni/drain", "POST", key) == 204
        assert head.drain.active


async def test_the_api_keys_of_the_server_guard_it(start: Start) -> None:
    async with start("--api-key", "right") as head:
        assert await head.status("/omni/replicas") == 401
        assert await head.status("/omni/replicas", key="right") == 200
        # As at vLLM's own port.
        assert (await head.status("/health"), await head.status("/metrics")) == (200, 200)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (path := tmp_path / "keys").write_text(KEY)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("with_keys", [True, False])
async def test_it_has_the_certificate_of_the_front_end_unless_it_listens_on_loopback(
    start: Start, key_file: str, certificate: list[str], with_keys: bool
) -> None:
    arguments = [*certificate, *(["--omni-admin-key-file", key_file] if with_keys else [])]
    scheme = "https" if with_keys else "http"
    async with start(*arguments, scheme=scheme) as head:
        assert await head.status("/health") == 200
        assert (found := find_head(HERE, head.port)) is not None
        assert found.admin_url == f"{scheme}://{HERE}:{head.admin_port}"


async def test_a_certificate_that_cannot_be_read_is_an_error_of_its_flag(start: Start, key_file: str) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile: "):
        async with start("--ssl-certfile", "/nowhere", "--omni-admin-key-file", key_file):
            pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_the_unspecified_address_of_ipv6_takes_ipv4_too(start: Start, key_file: str) -> None:
    async with start("--host", "::", "--omni-admin-key-file", key_file) as head:
        assert await head.status("/health") == 200


async def test_a_server_that_fails_is_logged_and_can_be_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr("uvicorn.Server.serve", fail)
    async with start():
        await eventually(lambda: "operators' HTTP server has failed" in caplog.text, "the line of the log")


async def test_metrics_are_those_of_the_fleet_and_vllms_of_each_replica(start: Start) -> None:
    async with start() as head:
        for index in (0, 1):
            head.server.statistics.joined(index)
        head.server.statistics.record(1, SchedulerStats(3, prefix_cache_stats=PrefixCacheStats(False, 1, 10, 5)))
        await head.fleet.submit("r")
        running = next(replica for replica in (0, 1) if head.fleet.in_flight[replica])
        head.fleet.say("r", 1, 2)
        answer = await head.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    [by_engine] = [name for name in values if name.startswith("vllm:num_requests_running{") and 'engine="1"' in name]
    assert float(values[by_engine]) == 3
    tokens = [name for name in values if name.startswith("vllm:generation_tokens_total{")]
    assert {f'engine="{running}"' in name: float(values[name]) for name in tokens} == {True: 2, False: 0}
    assert float(values['vllm_omni_fleet:replicas{stage="0",state="up"}']) == 2
    assert "vllm:time_to_first_token_seconds" not in answer.text
    # A second server in this process, in a test, may count again.
    assert not [each for each in REGISTRY._collector_to_names if type(each).__name__ == "FleetCollector"]


async def test_without_statistics_of_engines_there_are_no_metrics_of_vllm_that_are_always_0(start: Start) -> None:
    async with start("--disable-log-stats") as head:
        head.server.statistics.joined(0)
        text = (await head.client.get("/metrics")).text
        # A node without the flag sends reports all the same.
        reports = [SchedulerStats(kv_connector_stats={}) for _ in range(64)]
        while reports:
            last = ref(reports[-1])
            head.server.statistics.record(0, reports.pop())
        await eventually(lambda: last() is None, "reports to be dropped")
    assert "\nvllm_omni_fleet:replicas{" in text
    assert "\nvllm:" not in text


async def test_many_reports_that_cannot_be_added_are_recorded_without_a_scrape(start: Start) -> None:
    async with start() as head:
        statistics = head.server.statistics
        statistics.joined(0)
        reports = [SchedulerStats(7, kv_connector_stats={}) for _ in range(64)]
        for report in reports:
            await asyncio.to_thread(statistics.record, 0, report)
        await eventually(lambda: sampled("vllm:num_requests_running") == [7], "the recording")


def sampled(name: str) -> list[float]:
    return [sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name]


async def test_a_prompt_of_token_ids_is_explained_without_a_tokenizer(start: Start) -> None:
    async with start("--served-model-name", "tiny", "alias") as head:
        key = find_local_key(HERE, head.admin_port)
        assert key is not None
        ask = partial(head.status, "/omni/explain", "POST", key)
        assert await ask(json={"prompt": [1, 2, 3]}) == 200
        for model, status in (("alias", 200), ("adapter", 200), ("other", 404)):
            assert await ask(json={"prompt": [1, 2, 3], "model": model}) == status
        for prompt in ([], [-1], [1] * 513, "text without a tokenizer"):
            assert await ask(json={"prompt": prompt}) == 400


async def test_sighup_reads_the_admission_file_again(start: Start, tmp_path: Path) -> None:
    (file := tmp_path / "admission.yaml").write_text("max_waiting_requests: 5\n")
    async with start("--omni-admission", str(file), fleet=Fleet(replicas=1, plan=AdmissionConfig())) as head:
        admission = head.fleet.orchestrator.admission
        assert admission is not None
        await eventually(lambda: admission.config.max_waiting_requests == 5, "the first reading")
        file.write_text("max_waiting_requests: 6\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: admission.config.max_waiting_requests == 6, "the second reading")
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


async def test_a_port_that_is_taken_is_an_error_of_the_flag(start: Start, config: Any) -> None:
    async with start() as head:
        options = OmniConfig(admin_port=head.admin_port)
        second = AdminServer(
            head.fleet,
            head.args,
            options,
            config,
            drain=head.drain,
            is_starting=lambda: False,
            is_ending=lambda: False,
            adapters=list,
        )
        with pytest.raises(ConfigError, match=f"--omni-admin-port: {HERE} port {head.admin_port} cannot be bound"):
            await second.start()
        await second.close()


async def test_the_log_names_its_pages(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with start() as head:
            pages = re.findall(r"http://[\d.:]+/\w+", caplog.text)
            assert len(pages) == 2
            for page in pages:
                assert (await head.client.get(page)).status_code == 200


async def test_streams_end_when_the_server_closes(start: Start) -> None:
    async with start() as head:
        async with head.client.stream("GET", "/omni/fleet", headers={"Accept": "text/event-stream"}) as stream:
            chunks = stream.aiter_raw()
            assert await anext(chunks)
            closing = asyncio.create_task(head.server.close())
            async with asyncio.timeout(10):
                async for _ in chunks:
                    pass
            await closing
        with pytest.raises(httpx.ConnectError):
            await head.status("/health")


async def test_signals_of_the_process_are_left_alone(start: Start) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with start():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
