"""How the process of a stage starts and ends."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.fakes.conditions import eventually
from tests.stages.gate import Gate
from tests.stages.heads import open_head, stage
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.replicas.links.link import IpcLink
from vllm_omni_plugin.stages.compute_queue import ComputeQueue
from vllm_omni_plugin.stages.stage_engine import StageEngine
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ADD, StageRequest

OWNER = [
    sys.executable,
    "-c",
    "from vllm_omni_plugin.stages.stage_process import StageProcess\n"
    "from vllm_omni_plugin.stages.stage_process import StageParameters\n"
    "import sys\n"
    "engine, options = 'tests.stages.classes:CannotStart', {'how': 'wait'}\n"
    "parameters = StageParameters('vocoder', engine, options, 0, 0, b'00', sys.path)\n"
    "process = StageProcess(parameters)\n"
    "print(process.pid, flush=True)\n"
    "process.wait('', [])\n",
]
"""A process with a stage that loads for ever."""


def ended(fd: int) -> bool:
    return bool(select.select([fd], [], [], 10)[0])


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        ("classes:CannotStart", {"how": "raise"}, "FileNotFoundError: there are no weights in /nowhere"),
        ("classes:CannotStart", {"how": "die"}, "its process was ended by SIGKILL"),
        ("classes:CannotStart", {}, r"TypeError: .*missing 1 required keyword-only argument: 'how'"),
        ("classes:Echo", {"volume": 11}, "TypeError: .*unexpected keyword argument 'volume'"),
        ("classes:Nobody", {}, r"ConfigError: .*:Nobody cannot be imported \(AttributeError"),
        ("classes:NoStage", {}, r"ConfigError: .*:NoStage is not a subclass of .*\.PythonStage"),
        ("classes:Greedy", {}, "ConfigError: max_batch_size of .*:Greedy is 0; it must be at least 1"),
        ("nowhere:Echo", {}, r"ConfigError: .*:Echo cannot be imported \(ModuleNotFoundError"),
    ],
)
async def test_a_stage_that_cannot_start_says_why(engine: str, options: dict[str, object], reason: str) -> None:
    async with open_head(stage(engine, options=options), starts=False) as head:
        with pytest.raises(ReplicaError, match=f"replica 0 of stage 'vocoder' .* did not start: {reason}"):
            await head.start()
        with pytest.raises(ProcessLookupError):
            os.kill(head.spawned[0], 0)


async def test_a_cancelled_start_leaves_no_process() -> None:
    async with open_head(stage("classes:CannotStart", options={"how": "wait"}), starts=False) as head:
        start = asyncio.create_task(head.start())
        await eventually(lambda: head.spawned)
        fd = os.pidfd_open(head.spawned[0])
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert ended(fd)
        os.close(fd)


async def test_a_failed_on_spawn_leaves_no_process() -> None:
    async with open_head(stage(), starts=False) as head:

        def refuse(pid: int) -> None:
            head.spawned.append(os.pidfd_open(pid))
            raise RuntimeError("the reaper is closed")

        head.launcher = PythonStageLauncher(head.stage, refuse)
        with pytest.raises(RuntimeError, match="the reaper is closed"):
            await head.start()
        assert ended(head.spawned[0])
        os.close(head.spawned[0])


async def test_a_killed_replica_is_seen_and_can_be_started_again() -> None:
    async with open_head(stage()) as head:
        os.kill(head.replica.pid, signal.SIGKILL)
        await eventually(lambda: head.deaths)
        assert "exited" in head.deaths[0]
        await head.replica.close(head.executor, timeout=0.0)
        await head.start()
        head.send("a", "back")
        assert (await head.answer("a")).text == "back!"


async def test_a_stage_that_cannot_handle_a_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(queue: ComputeQueue, request: StageRequest) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(ComputeQueue, "add", broken)
    link = IpcLink(new_ipc_address(), new_ipc_address(), b"00")
    with ExitStack() as stack:
        stack.callback(link.close)
        executor = stack.enter_context(ThreadPoolExecutor(1))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        engine = StageEngine(lambda jobs: [], executor, 1)
        stack.callback(engine.end)
        engine.connect(context, b"00", link.input_addr, [link.output_addr], b"")
        await asyncio.to_thread(link.input_socket.recv_multipart)
        link.send((ADD, msgspec.msgpack.encode(StageRequest("a", text="x"))))
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="broken"):
                await engine.ended


async def test_a_stage_whose_code_ends_its_process_has_crashed_before_the_process_has_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    async with open_head(stage("classes:Ending")) as head:
        head.send("a", str(note))
        await eventually(lambda: head.deaths)
        assert head.deaths == ["the engine reported its own death"]
        assert head.client.engine_failed
        note.read_text()
        # A head that sees this exit first counts a crash, too.
        exited = await asyncio.to_thread(os.waitid, os.P_PID, head.replica.pid, os.WEXITED | os.WNOWAIT)
        assert exited is not None
        assert exited.si_status == 1


def has_handled(pid: int, signum: int) -> bool:
    """Whether a process has handled a signal sent before: the signal wakes the main thread, which sleeps again then."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    pending = any(int(lines[name], 16) >> (signum - 1) & 1 for name in ("SigPnd", "ShdPnd"))
    return not pending and lines["State"].startswith("S")


async def test_the_running_batch_is_answered_after_sigterm(gate: Gate, tmp_path: Path) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    async with open_head(stage("classes:Stopping", options={"note": str(note)})) as head:
        head.send("a", gate.job)
        await gate.reached()
        head.send("b", "dropped")
        assert await head.client.call("is_sleeping") is False
        os.kill(head.replica.pid, signal.SIGTERM)
        await eventually(lambda: has_handled(head.replica.pid, signal.SIGTERM))
        gate.release()
        assert (await head.answer("a")).text == "slow!"
        assert note.read_text() == "stopped"
        await eventually(lambda: head.deaths)
        assert [output.request_id for output in head.outputs] == ["a"]


async def test_a_computation_that_never_ends_is_killed_when_the_replica_closes(gate: Gate) -> None:
    async with open_head(stage()) as head:
        head.send("a", gate.job)
        await gate.reached()
        fd = os.pidfd_open(head.replica.pid)
        await head.replica.close(head.executor, timeout=0.0)
        assert ended(fd)
        os.close(fd)
        gate.release()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
async def test_processes_that_a_stage_has_started_do_not_outlive_it(signum: signal.Signals) -> None:
    async with open_head(stage("classes:Starting")) as head:
        head.send("a", "start one")
        started = os.pidfd_open((await head.answer("a")).metadata["pid"])
        os.kill(head.replica.pid, signum)
        await eventually(lambda: head.deaths)
        await head.replica.close(head.executor, timeout=0.0)
        assert ended(started)
        os.close(started)


def test_a_stage_does_not_outlive_the_process_that_started_it() -> None:
    with subprocess.Popen(OWNER, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        fd = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
        assert ended(fd)
        os.close(fd)


def test_the_process_imports_neither_vllm_nor_torch_nor_the_head() -> None:
    script = (
        "import sys, vllm_omni_plugin.stages.stage_main\n"
        "heavy = {'vllm', 'torch', 'vllm_omni_plugin.orchestrator', 'vllm_omni_plugin.integration', 'jsonschema'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
