"""The exit of an engine tells whether it can have crashed of a request."""

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import DEAD_FRAME, FakeRequest
from tests.orchestrator.local_node import running_node


@pytest.mark.parametrize(
    ("ended", "suspects"),
    [
        ("it was ended by SIGSEGV", 2),
        ("it exited with code 1", 2),
        ("its worker VllmWorker-0 was ended by SIGILL", 2),
        ("it was ended by SIGKILL", 0),
        ("its worker VllmWorker-0 was ended by SIGKILL", 0),
        ("it was ended by SIGTERM", 0),
        ("it was ended by SIGINT", 0),
        pytest.param("it exited with code 0", 0, id="vLLM's way to end at SIGTERM"),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
async def test_only_an_engine_that_crashed_by_itself_makes_what_it_had_suspect(
    ended: str, suspects: int, reports: bool
) -> None:
    async with running_node() as node:
        await node.replicas.start()
        for name in "ab":
            node.submit(FakeRequest(name, affinity=0))
        await eventually(lambda: len(node.orchestrator.request_states) == 2)
        engine = node.engine_of(0)
        engine.process.exit_note = ended
        if reports:
            engine.say(DEAD_FRAME)
        else:
            engine.process.die()
        runs = [state.runs[0] for state in node.orchestrator.request_states.values()]
        await eventually(lambda: all(run.losses for run in runs), "the loss")
        assert sum(len(run.crash_losses) for run in runs) == suspects
