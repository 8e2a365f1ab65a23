"""Threads for functions that may never return."""

import subprocess
import sys
import threading

from tests.fakes.conditions import eventually
from vllm_omni_plugin.orchestrator.pipeline.input_builder import DaemonThreads


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


async def test_closing_drops_queued_calls_and_lets_running_calls_end() -> None:
    threads, begun, gate, done = DaemonThreads(1, "omni-test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        gate.wait(30)
        done.append("first")

    threads.submit(first)
    threads.submit(lambda: done.append("second"))
    assert begun.wait(30)
    threads.close()
    threads.close()
    threads.submit(lambda: done.append("third"))
    gate.set()
    await eventually(lambda: named("omni-test") == [])
    assert done == ["first"]


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    script = (
        "import threading\n"
        "from vllm_omni_plugin.orchestrator.pipeline.input_builder import DaemonThreads\n"
        "threads = DaemonThreads(1, 'omni-test')\n"
        "begun = threading.Event()\n"
        "threads.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait(30)\n"
        "threads.close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
