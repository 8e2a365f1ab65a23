"""Where a head listens. With `--port 0` it goes by the port that was bound: there, commands find its key."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.api_server import entry

from vllm_omni_plugin.integration.options.listening import listen_for_clients
from vllm_omni_plugin.integration.processes import several_servers
from vllm_omni_plugin.integration.processes.serve_command import patch_serve_command

from .pipeline_files import JOIN, read

HERE = "127.0.0.1"
LINE = f"m --port 0 --host {HERE} --omni-dp-size-local 2"


class PublishedError(Exception):
    """The head's key was published."""


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """What vLLM listens at."""
    with socket.create_server((HERE, 0)) as listening:
        vllms = lambda _args, reuse_port: (f"http://{HERE}:0", listening)  # noqa: E731
        for module in (entry, several_servers):
            monkeypatch.setattr(module, "setup_server", vllms)
        yield listening.getsockname()


def test_one_server_has_it_before_it_makes_its_key(bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_headless", "run_multi_api_server", "validate_parsed_serve_args"):
        monkeypatch.setattr(serve, name, getattr(serve, name))
    patch_serve_command()
    args, _ = read(LINE)
    address, _ = entry.setup_server(args, reuse_port=False)
    assert (args.port, address) == (bound[1], "http://{}:{}".format(*bound))


def test_several_servers_share_the_key_of_that_port(bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(*address: Any) -> None:
        assert address == bound
        raise PublishedError

    for variable in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_SIM_MULTI_NUMA"):
        # Set first, so that what is set here is taken back.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(several_servers, "publish_local_key", publish)
    monkeypatch.setattr(several_servers, "setup_multiprocess_prometheus", lambda: None)
    with pytest.raises(PublishedError):
        several_servers.serve_api_servers(*read(f"m --port 0 --host {HERE} {JOIN} --omni-join --api-server-count 2"))


@pytest.mark.filterwarnings("ignore:unclosed")  # vLLM leaves it to the end of the process
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("m --host {} --port {}", "argument --port: {} port {} cannot be bound on this machine: Address already"),
        ("m --host 192.0.2.77 --port {1}", "argument --host: 192.0.2.77 port {1} cannot be bound on this machine"),
        ("m --host no.such.name.invalid", "argument --host: no.such.name.invalid port 8000 cannot be bound"),
        ("m --uds {2}", "argument --uds: {2} cannot be bound on this machine: Address already in use: remove the file"),
    ],
)
def test_an_address_that_cannot_be_bound_ends_the_command(
    line: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((HERE, 0)) as taken, socket.socket(socket.AF_UNIX) as left:
        left.bind(path := str(tmp_path / "left"))
        places = *taken.getsockname(), path
        args, _ = read(f"{line.format(*places)} --omni-dp-size-local 2")
        with pytest.raises(SystemExit):
            listen_for_clients(entry.setup_server, args, reuse_port=False)
        assert f"vllm serve: error: {error.format(*places)}" in capsys.readouterr().err
