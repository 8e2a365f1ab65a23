"""The orchestrator's thread, from the side that starts and closes it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeOutput, FakeOutputs, FakeRequest
from tests.fakes.engines import READY, FakeEngine, Plan
from tests.orchestrator.local_node import EACH_START_FAILURE, Node
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator import FleetControl, OrchestratorThread
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

# Nothing that AsyncLLM hands over looks like this, so the orchestrator cannot deal with it.
UNKNOWN_TO_ENGINES = SubmitRequest(object(), 0.0)


class Head(Node):
    """A node with two replicas and its orchestrator's thread."""

    def __init__(self) -> None:
        self._others = set(threading.enumerate())
        super().__init__()
        control = FleetControl(self.orchestrator, FleetCalls(self.orchestrator))
        self.thread = OrchestratorThread(self.orchestrator, control, self.replicas)

    def is_closed(self) -> bool:
        """Whether nothing of it is left: no engine, no thread, and queues that refuse."""
        if any(not engine.process.ended for engine in self.launcher.engines):
            return False
        if any(thread.name == "omni-orchestrator" for thread in set(threading.enumerate()) - self._others):
            return False
        with pytest.raises(QueueClosedError):
            self.orchestrator.front_end.request_async_queue.put(SubmitRequest(None, 0.0))
        return True


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.thread.close(0.0)
    head.launcher.close()


def test_start_returns_when_all_serve_and_close_ends_everything(head: Head) -> None:
    assert head.thread.start() == [[READY, READY]]
    assert head.orchestrator.can_serve
    head.thread.close(3.0)
    head.thread.close(0.0)
    assert [engine.process.shutdowns for engine in head.launcher.engines] == [[3.0], [3.0]]
    assert head.is_closed()


def submit(head: Head) -> tuple[FakeEngine, str]:
    """Hand a request over; returns the engine that got it and its id there."""
    head.submit(FakeRequest("a"))
    asyncio.run(eventually(lambda: any(member.in_flight for member in head.pool.members)))
    (engine,) = (head.engine_of(member.replica_id) for member in head.pool.members if member.in_flight)
    return engine, str(msgspec.json.decode(engine.receive()[1])["request_id"])


@pytest.fixture
def waiting(head: Head, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Future[float]]]:
    """Begins to wait for requests, in a thread that does so by then; returns what is left of 60 s in the end."""
    began = threading.Event()
    wait_until_idle = head.orchestrator.wait_until_idle

    async def beginning() -> bool:
        began.set()
        return await wait_until_idle()

    monkeypatch.setattr(head.orchestrator, "wait_until_idle", beginning)
    with ThreadPoolExecutor() as executor:

        def begin() -> Future[float]:
            left = executor.submit(head.thread.wait_for_requests, 60.0)
            assert began.wait(10)
            assert not left.done()
            return left

        yield begin


def test_wait_for_requests_returns_when_the_last_has_finished(head: Head, waiting: Callable[[], Future[float]]) -> None:
    head.thread.start()
    engine, request_id = submit(head)
    left = waiting()
    engine.say(msgspec.json.encode(FakeOutputs(outputs=[FakeOutput(request_id, [1], "stop")])))
    assert 0 < left.result(10) <= 60
    assert head.orchestrator.can_serve


def test_wait_for_requests_returns_zero_at_its_timeout_or_if_cancelled(
    head: Head, waiting: Callable[[], Future[float]]
) -> None:
    head.thread.start()
    submit(head)
    assert head.thread.wait_for_requests(0.05) == 0
    left = waiting()
    head.thread.cancel_wait()
    assert left.result(10) == 0
    assert head.thread.wait_for_requests(60.0) == 0, "a later wait is cancelled, too"


def test_a_thread_that_was_never_started_has_nothing_to_wait_for_or_to_close(head: Head) -> None:
    assert head.thread.wait_for_requests(60.0) == 0
    head.thread.close(0.0)
    assert head.launcher.starts == []


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda head: head.thread.close(0.0), id="closed"),
        pytest.param(lambda head: head.orchestrator.front_end.request_async_queue.put(UNKNOWN_TO_ENGINES), id="failed"),
    ],
)
def test_wait_for_requests_returns_at_once_after_the_end(
    head: Head, waiting: Callable[[], Future[float]], end: Callable[[Head], None]
) -> None:
    head.thread.start()
    submit(head)
    left = waiting()
    end(head)
    assert left.result(10) == 0


@EACH_START_FAILURE
def test_a_failure_at_start_is_raised_by_start_and_nothing_is_left(
    head: Head, plan: Plan, error: type[Exception], text: str
) -> None:
    for replica_id in range(2):
        head.launcher.plan(replica_id, plan)
    with pytest.raises(error, match=text):
        head.thread.start()
    assert head.is_closed()


def test_closing_from_another_thread_while_it_starts_ends_the_start(head: Head) -> None:
    head.launcher.plan(1, Plan(ready=False))
    spawned = threading.Event()
    start = head.launcher.start

    def note_spawn(replica_id: int) -> object:
        engine = start(replica_id)
        if replica_id == 1:
            spawned.set()
        return engine

    head.launcher.start = note_spawn  # type: ignore[method-assign, assignment]

    def close_once_spawned() -> None:
        spawned.wait(10)
        head.thread.close(0.0)

    closer = threading.Thread(target=close_once_spawned)
    closer.start()
    with pytest.raises(ReplicaError, match="closed while it started"):
        head.thread.start()
    closer.join()
    assert head.is_closed()


def test_a_crash_of_the_orchestrator_releases_its_clients_and_ends_the_engines(
    head: Head, caplog: pytest.LogCaptureFixture
) -> None:
    head.thread.start()
    queue = head.orchestrator.front_end.output_async_queue
    head.orchestrator.front_end.request_async_queue.put(UNKNOWN_TO_ENGINES)
    with pytest.raises(QueueClosedError):
        asyncio.run(queue.get_batch())
    head.thread.close(0.0)
    assert head.is_closed()
    assert "The orchestrator failed" in caplog.text
