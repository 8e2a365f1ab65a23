"""Command lines that cannot be honoured end with one line naming flag and reason, before any engine starts."""

import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .cli_probe import probe
from .server import serve_command, serve_environment

POLICIES = "random, round-robin, least-queue-length"


@dataclass(frozen=True)
class Case:
    """A command line, and what the answer must say."""

    arguments: str
    flag: str
    reason: str
    environment: tuple[tuple[str, str], ...] = ()


def fleet_with(arguments: str, flag: str, reason: str, **environment: str) -> Case:
    return Case(f"--omni-dp-size-local 2 {arguments}", flag, reason, tuple(environment.items()))


LEAST_TOKENS = "--omni-lb-policy least-tokens --omni-lb-config"
OWN_FLAGS = (
    Case("--omni-lb-policy roundrobin", "--omni-lb-policy", "unknown load balancing policy 'roundrobin'"),
    Case("--omni-lb-policy roundrobin", "--omni-lb-policy", "did you mean 'round-robin'?"),
    Case("--omni-lb-policy x", "--omni-lb-policy", f"use one of {POLICIES}"),
    Case("--omni-lb-policy nowhere:Policy", "--omni-lb-policy", "'nowhere:Policy' cannot be imported"),
    Case("--omni-lb-policy json:dumps", "--omni-lb-policy", "is not a class"),
    Case("--omni-lb-policy json:JSONEncoder", "--omni-lb-policy", "has no method select(task, replicas)"),
    Case("--omni-dp-size-local 0", "--omni-dp-size-local", "at least one, or else --omni-master-address"),
    Case("--omni-dp-size-local abc", "--omni-dp-size-local", "'abc' is not a whole number"),
    Case("--omni-dp-size-local", "--omni-dp-size-local", "expected one argument"),
    Case("--omni-pipeline stages.yaml", "--omni-pipeline", "not allowed with a model (some-model)"),
    Case("--omni-admin-key-file /nowhere/keys", "--omni-admin-key-file", "/nowhere/keys: No such file or directory"),
    Case("--omni-admin-key-file /dev/null", "--omni-admin-key-file", "it is not a regular file"),
    Case("--omni-admin-key-file /dev/null --omni-admin-loopback", "--omni-admin-loopback", "choose one of them"),
    Case("--omni-lb-config {x", "--omni-lb-config", "'{x' is not JSON: "),
    Case("--omni-lb-config [1]", "--omni-lb-config", "'[1]' is not a JSON object"),
    Case('--omni-lb-policy least-queue-length --omni-lb-config {"weight":1}', "--omni-lb-config", "it has no options"),
    Case(
        f'{LEAST_TOKENS} {{"decode_wait":1}}',
        "--omni-lb-config",
        "did you mean 'decode_weight'?): use decode_weight, kv_tokens",
    ),
    Case(
        f'{LEAST_TOKENS} {{"decode_weight":-1}}',
        "--omni-lb-config",
        "option decode_weight: -1 is out of range: give a number",
    ),
    Case("--omni-admission /nowhere/a.yaml", "--omni-admission", "/nowhere/a.yaml: cannot be read: No such file"),
    Case("--omni-admission /dev/null", "--omni-admission", "/dev/null: the file is empty"),
    Case("--omni-tenant-header X:Y", "--omni-tenant-header", "'X:Y' is not a valid name of an HTTP header"),
    Case("--omni-migration-limit -1", "--omni-migration-limit", "-1 is below 0"),
)
HEAD = "-oma 127.0.0.1 -omp 23900"
NODE = f"--headless {HEAD}"
FLEET_FLAGS = (
    Case(f"{NODE} --omni-dp-size-local 0", "--omni-dp-size-local", "at least one with --headless"),
    Case(f"{NODE} --api-server-count 2", "--api-server-count", "such a node has no API server"),
    Case(f"{NODE} --omni-lb-policy random", "--omni-lb-policy", "it is the head's"),
    Case(f"{NODE} --omni-lb-config {{}}", "--omni-lb-config", "not allowed with --headless: it is the head's"),
    Case(f"{NODE} --omni-replica-address 192.0.2.1", "--omni-replica-address", "cannot be bound on this machine"),
    Case(f"{NODE} --omni-replica-address no.such.name.", "--omni-replica-address", "not a known name"),
    Case(f"{NODE} --omni-replica-address 0.0.0.0 --omni-insecure", "--omni-replica-address", "0.0.0.0 is a wildcard"),
    Case(f"{HEAD} --api-server-count 2 --omni-replica-address 192.0.2.1", "--omni-replica-address", "cannot be bound"),
    Case(f"{NODE} --omni-replica-address 10.0.0.300", "-ora", "'10.0.0.300' is neither an address nor the name"),
    Case("--headless -oma 10.0.0.1:7500 -omp 7500", "-oma", "its port has a flag of its own"),
    Case("--headless -oma http://head -omp 7500", "-oma", "'http://head' is neither an address nor the name of a host"),
    Case(f"{NODE} --nnodes 2 --node-rank 1 --master-addr first:1", "--master-addr", "its port has a flag of its own"),
    Case(f"{NODE} --omni-replica-ports 9-3", "--omni-replica-ports", "9-3"),
    Case(f"{NODE} --omni-replica-ports x", "--omni-replica-ports", "x"),
    Case("--omni-master-address 127.0.0.1", "--omni-master-address", "needs --omni-master-port too"),
    Case("--omni-master-port 23900", "--omni-master-port", "needs --omni-master-address too"),
    Case("-oma 127.0.0.1 -omp 70000", "-omp", "70000 is above 65535"),
    Case("-oma 192.0.2.1 -omp 23900", "--omni-master-address", "192.0.2.1 port 23900 cannot be bound on this machine"),
    Case("-oma 0.0.0.0 -omp 23900", "--omni-master-address", "without a secret everybody"),
    Case("-oma 0.0.0.0 -omp 23900", "--omni-master-address", "--omni-secret-file, or accept that with --omni-insecure"),
    Case(f"{NODE} --omni-join", "--omni-join", "it is the head's"),
    Case(f"{NODE} --omni-admin-key-file keys", "--omni-admin-key-file", "it is the head's"),
    Case("--omni-join", "--omni-join", "needs --omni-master-address and --omni-master-port, the fleet to join"),
    Case(f"{HEAD} --omni-join --omni-dp-size-local 1", "--omni-dp-size-local", "such a head has no engines"),
    Case(f"{HEAD} --omni-join --omni-replica-ports 9-12", "--omni-replica-ports", "such a head has no replicas"),
    Case(f"{HEAD} --omni-replica-address 127.0.0.1", "--omni-replica-address", "several API servers"),
    Case(f"{HEAD} --api-server-count 33", "--api-server-count", "33 API servers"),
    Case(f"{HEAD} --omni-join --api-server-count 33", "--api-server-count", "a replica serves at most 32 heads"),
    Case(f"{HEAD} --data-parallel-size 33", "--api-server-count", "one for each data-parallel rank, unless given"),
    Case(f"{HEAD} --omni-stage-id 1", "--omni-stage-id", "needs --headless"),
    Case(f"{HEAD} --omni-heartbeat-interval 4", "--omni-heartbeat-interval", "under a third of"),
    Case(f"{HEAD} --omni-heartbeat-interval 0", "--omni-heartbeat-interval", "must be positive"),
    Case(f"{HEAD} --omni-lease-timeout 0", "--omni-lease-timeout", "must be positive"),
    Case(f"{HEAD} --omni-heartbeat-timeout nan", "--omni-heartbeat-timeout", "'nan' is not a number of seconds"),
    Case(f"{HEAD} --omni-replica-wait -1", "--omni-replica-wait", "-1 s is below 0"),
    Case(f"{HEAD} --omni-secret-file /nowhere/secret", "--omni-secret-file", "/nowhere/secret"),
    Case(f"{HEAD} --omni-secret-file /dev/null --omni-insecure", "--omni-insecure", "choose one of them"),
    Case("--omni-secret-file /dev/null", "--omni-secret-file", "there is no link between processes"),
    Case("--omni-heartbeat-timeout 3", "--omni-heartbeat-interval", "under a third of"),
    Case("--omni-max-message-size 64", "--omni-max-message-size", "there is no link between processes"),
    Case(f"{HEAD} --omni-max-message-size 0", "--omni-max-message-size", "0 is below 1"),
)
BALANCES = "every data-parallel rank is a replica of the fleet"
MEET = "ranks on several machines meet by --nnodes"
TOGETHER = (
    fleet_with("--grpc", "--grpc", "HTTP server only"),
    fleet_with("--grpc-port 5000", "--grpc-port", "needs vLLM's Rust front end"),
    fleet_with("--headless", "--omni-master-address", "a node needs it, and --omni-master-port"),
    fleet_with("-dp 2 --data-parallel-size-local 1", "--data-parallel-size-local", "1 of 2 ranks"),
    fleet_with("--data-parallel-address 127.0.0.1", "--data-parallel-address", MEET),
    fleet_with("--data-parallel-rpc-port 23901", "--data-parallel-rpc-port", MEET),
    fleet_with("--data-parallel-backend ray", "--data-parallel-backend", "processes of their replica's node"),
    fleet_with("", "VLLM_DP_SIZE", "give --data-parallel-size", VLLM_DP_SIZE="2"),
    fleet_with("--data-parallel-rank 0", "--data-parallel-rank", BALANCES),
    fleet_with("--data-parallel-start-rank 0", "--data-parallel-start-rank", MEET),
    fleet_with("--data-parallel-external-lb", "--data-parallel-external-lb", BALANCES),
    fleet_with("--data-parallel-hybrid-lb", "--data-parallel-hybrid-lb", BALANCES),
    fleet_with("--data-parallel-multi-port-external-lb", "--data-parallel-multi-port-external-lb", BALANCES),
    fleet_with(
        "--distributed-executor-backend external_launcher",
        "--distributed-executor-backend",
        "starts the processes of its engines itself",
    ),
    fleet_with("--enable-elastic-ep", "--enable-elastic-ep", "as many as it was started with"),
    fleet_with("--enable-fault-tolerance", "--enable-fault-tolerance", "restarts lost replicas itself"),
    fleet_with("--nnodes 2", "--nnodes", "not allowed on a head, whose own engines are on its machine"),
    *(
        Case(f"{NODE} -tp 4 --nnodes 2 {arguments}", flag, reason)
        for arguments, flag, reason in (
            ("--omni-dp-size-local 2", "--omni-dp-size-local", "a process on each machine for each replica"),
            ("--data-parallel-size 3", "--data-parallel-size", "3 ranks cannot be divided equally among 2"),
            ("-dp 4 --data-parallel-size-local 4", "--data-parallel-size-local", "an equal share of them"),
            ("--node-rank 2", "--node-rank", "2 of --nnodes 2: ranks begin at 0"),
            ("--node-rank=-1", "--node-rank", "-1 of --nnodes 2"),
            ("--nnodes 1 --node-rank 1", "--node-rank", "1 of --nnodes 1"),
            ("--nnodes 0", "--node-rank", "0 of --nnodes 0"),
            ("--master-port 65536", "--master-port", "65536 is not 1 to 65535"),
            ("--distributed-executor-backend uni", "--distributed-executor-backend", "machines meet with 'mp' only"),
            (
                '--kv-transfer-config {"kv_connector":"ExampleConnector","kv_role":"kv_both"}',
                "--kv-transfer-config",
                "another id",
            ),
        )
    ),
    fleet_with("--mm-tensor-ipc torch_shm", "--mm-tensor-ipc", "a single engine only"),
)
CASES = {f"{case.arguments}: {case.flag} {case.reason}": case for case in (*OWN_FLAGS, *FLEET_FLAGS, *TOGETHER)}
HONOURED = {
    "one replica": Case("--omni-dp-size-local 1", "", ""),
    "engines with long steps": Case("--omni-heartbeat-timeout 60", "", ""),
    "no moves": Case("--omni-migration-limit 0", "", ""),
    "one API server": fleet_with("--api-server-count 1 --data-parallel-size 1", "", ""),
    "several API servers": fleet_with("--api-server-count 2", "", ""),
    "as many API servers as a replica serves": fleet_with("--api-server-count 32 --data-parallel-size 33", "", ""),
    "several API servers with replicas that others reach": Case(
        f"{HEAD} --api-server-count 2 --omni-replica-address 127.0.0.1 --omni-replica-ports 23910-23990", "", ""
    ),
    "replicas of several ranks": fleet_with("--data-parallel-size 2 --data-parallel-size-local 2", "", ""),
    "a head that others join": Case(HEAD, "", ""),
    "a head without engines": Case(f"{HEAD} --omni-dp-size-local 0", "", ""),
    "a node": Case(f"{NODE} --omni-stage-id 0 --omni-drain-timeout 5 --omni-replica-ports 20000-20010", "", ""),
    "a machine of several": Case(
        f"{NODE} -tp 4 -dp 1 --data-parallel-size-local 1 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1", "", ""
    ),
    "a machine of a lockstep group": Case(
        f"{NODE} -dp 4 --data-parallel-size-local 2 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1", "", ""
    ),
    "open to all": Case("-oma 0.0.0.0 -omp 23900 --omni-insecure", "", ""),
    "options of a policy": Case(f'{LEAST_TOKENS} {{"decode_weight":0.5}}', "", ""),
    "a flag for each option": Case(f"{LEAST_TOKENS}.decode_weight 0.5", "", ""),
    "a policy without options": Case("--omni-lb-config {}", "", ""),
    "options in a file": Case("--config FILE", "", ""),
    "no flag of ours": Case("--data-parallel-size 2", "", ""),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How vLLM's parser and ours answer each command line, all in one process."""
    folder = tmp_path_factory.mktemp("cases")
    file = folder / "fleet.yaml"
    file.write_text("omni-lb-policy: least-tokens\nomni-lb-config:\n  decode_weight: 0.5\n")
    cases = folder / "cases.json"
    cases.write_text(
        json.dumps(
            {
                name: {
                    "arguments": ["some-model", *case.arguments.replace("FILE", str(file)).split()],
                    "environment": dict(case.environment),
                }
                for name, case in {**CASES, **HONOURED}.items()
            }
        )
    )
    return probe("refuse", cases, folder / "answers.json")


@pytest.mark.parametrize("name", CASES)
def test_refused_with_one_line_naming_flag_and_reason(answers: Any, name: str) -> None:
    case, log = CASES[name], answers[name]["errors"]
    assert answers[name]["code"] == 2
    (line,) = [line for line in log.splitlines() if line.startswith("vllm serve: error: ")]
    assert case.flag in line.split(": ")[2]
    assert case.reason in line
    assert "Traceback" not in log


@pytest.mark.parametrize("name", HONOURED)
def test_what_can_be_honoured_is_not_refused(answers: Any, name: str) -> None:
    assert answers[name]["code"] is None
    assert "error" not in answers[name]["errors"]


def test_a_busy_port_ends_the_command_before_any_engine_starts(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = serve_command(tiny_model, "--host", "127.0.0.1", "--port", port, "--omni-dp-size-local", "2")
        with subprocess.Popen(
            command,
            env=serve_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            log, _ = process.communicate(timeout=120)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert process.returncode != 0
    assert "Address already in use" in log
    assert "EngineCore" not in log
