"""However several API servers end, nothing of theirs is left."""

import os
from functools import partial
from pathlib import Path

import psutil
import pytest

from .api_servers import ApiServers
from .conftest import start_api_servers
from .load import Load
from .server import STOP_S
from .servers import Servers
from .test_shutdown import terminate

NOT_OURS = ("torchinductor_", "vllm_dist_")
"""Torch's cache, and the store of an engine that vLLM kills, because it takes longer than 15 s to exit."""


def sockets_of_engines(server: ApiServers) -> set[str]:
    """Names of the sockets that engines and their workers listen on, which vLLM leaves behind."""
    paths = [
        connection.laddr
        for engine in server.engines
        for process in (engine, *engine.children(recursive=True))
        for connection in process.net_connections("unix")
    ]
    return {Path(path).name for path in paths if path}


def shared_memory_of(server: ApiServers) -> set[Path]:
    """Files of shared memory that its processes have mapped."""
    process = psutil.Process(server.process.pid)
    pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}


def test_sigterm_ends_streams_and_leaves_no_process_and_no_file(api_servers: ApiServers) -> None:
    of_engines, shared_memory = sockets_of_engines(api_servers), shared_memory_of(api_servers)
    with Load(api_servers) as load:
        streams = [load.send(900, stream=True) for _ in range(4)]
        assert all(stream.started.wait(60) for stream in streams)
        code, left = terminate(api_servers)
    assert (code, left) == (0, [])
    # As one engine of vLLM's ends its requests.
    assert [(stream.finish_reasons, stream.errors) for stream in streams] == [(["abort"], [])] * 4
    files = set(os.listdir(api_servers.scratch)) - of_engines
    # The folder of the user stays, without the server's admin key.
    (of_user,) = [name for name in files if not name.startswith(NOT_OURS)]
    assert (of_user, os.listdir(Path(api_servers.scratch, of_user))) == (f"vllm-omni-plugin-{os.geteuid()}", [])
    assert [path for path in shared_memory if path.exists()] == []


@pytest.mark.long
def test_all_processes_end_with_a_supervisor_that_is_killed(servers: Servers, tiny_model: Path) -> None:
    server: ApiServers = servers.keep("killed-api-servers", partial(start_api_servers, tiny_model), engines=2)
    started = psutil.Process(server.process.pid).children(recursive=True)
    server.kill()
    _, left = psutil.wait_procs(started, timeout=STOP_S)
    assert left == []
