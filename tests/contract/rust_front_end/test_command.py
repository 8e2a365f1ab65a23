"""The front end is started as vLLM starts it, except what we change, and does not outlive its parent."""

import itertools
import json
import os
import select
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import vllm
import zmq
from vllm import envs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import make_zmq_listener
from vllm.v1.utils import RustFrontendProcessManager

from vllm_omni_plugin.integration.rust_front_end import serve
from vllm_omni_plugin.integration.rust_front_end.command import WAITS_FOR_EVER_S, front_end_command
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

PROGRAM = "/somewhere/vllm-rs"


class StartedError(Exception):
    """In place of a started process."""


def parse(line: str) -> Namespace:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["tiny", *line.split()])
    args.model = args.model_tag or args.model
    return args


def started_by_vllm(args: Namespace, monkeypatch: pytest.MonkeyPatch, grpc: bool) -> tuple[list[str], list[str]]:
    """The command with which vLLM starts the front end, and ours for the same sockets."""
    commands: list[list[str]] = []

    def start(command: list[str], pass_fds: list[int]) -> Any:
        descriptors = dict(itertools.pairwise(command))
        http, requests, outputs = (int(descriptors[f"--{name}-fd"]) for name in NAMES)
        third = int(descriptors["--grpc-listen-fd"]) if grpc else None
        assert set(pass_fds) == {http, requests, outputs, *(() if third is None else (third,))}
        commands.extend([command, front_end_command(PROGRAM, args, http, requests, outputs, grpc=third)])
        raise StartedError

    monkeypatch.setattr(subprocess, "Popen", start)
    listeners = [make_zmq_listener(new_ipc_address(), kind) for kind in (zmq.ROUTER, zmq.PULL)]
    with socket.socket() as http, socket.socket() as other, pytest.raises(StartedError):
        RustFrontendProcessManager(PROGRAM, http, args, *listeners, 0, 1, 1, grpc_sock=other if grpc else None)
    theirs, ours = commands
    return theirs, ours


NAMES = ("listen", "input-listener", "output-listener")
SERVED = "--port 8001 --served-model-name a b --max-model-len 512 --enforce-eager --dtype float32"
TOOLS = "--enable-auto-tool-choice --tool-call-parser hermes --api-key secret other --shutdown-timeout 9"


@pytest.mark.usefixtures("sockets")
@pytest.mark.parametrize("line", ["", SERVED, TOOLS, "--grpc-port 5000 --limit-mm-per-prompt.image 2"])
def test_it_is_vllms_except_that_a_standby_waits_for_ever(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = started_by_vllm(parse(line), monkeypatch, "grpc" in line)
    assert ours[:-1] == theirs[:-1]
    expected = json.loads(theirs[-1]) | {"engine_ready_timeout_secs": WAITS_FOR_EVER_S}
    assert json.loads(ours[-1]) == expected


@pytest.mark.parametrize("line", ["--omni-dp-size-local 2", "--omni-dp-size-local 0 -oma 127.0.0.1 -omp 20000"])
def test_it_knows_nothing_of_the_fleet(line: str) -> None:
    commands = [
        front_end_command(PROGRAM, serve.front_end_args(parse(f"{SERVED} {flags}")), 3, 4, 5, grpc=None)
        for flags in ("", line)
    ]
    settings = [json.loads(command[-1]) for command in commands]
    assert settings[1] == settings[0]
    assert {name for name in settings[0] if name.startswith(("omni", "data_parallel"))} == set()


OWNER = """
import subprocess, sys, time
from vllm_omni_plugin.replicas.engine.reaper import Reaper
front_end = subprocess.Popen(sys.argv[1:], close_fds=False, start_new_session=True)
reaper = Reaper()
reaper.watch(front_end.pid)
print(front_end.pid, flush=True)
time.sleep(600)
"""


def test_it_does_not_outlive_the_process_that_started_it(tiny_model: Path, sockets: Path) -> None:
    """It would not notice, and let its clients wait for ever."""
    args = parse("")
    args.model = args.model_tag = str(tiny_model)
    listeners = [make_zmq_listener(new_ipc_address(), kind) for kind in (zmq.ROUTER, zmq.PULL)]
    with socket.create_server(("127.0.0.1", 0)) as http:
        inherited = [http.fileno(), *(listener.socket.fileno() for listener in listeners)]
        command = front_end_command(str(envs.VLLM_RUST_FRONTEND_PATH), args, *inherited, grpc=None)
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, *command], stdout=subprocess.PIPE, pass_fds=inherited, text=True
        )
        with owner:
            assert owner.stdout is not None
            front_end = os.pidfd_open(int(owner.stdout.readline()))
            owner.kill()
            assert select.select([front_end], [], [], 10)[0]
            os.close(front_end)
    for listener in listeners:
        listener.cleanup()


def test_its_program_says_vllms_version(sockets: Path) -> None:
    said = subprocess.run([str(envs.VLLM_RUST_FRONTEND_PATH), "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == vllm.__version__.partition("+")[0]
