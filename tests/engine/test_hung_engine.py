"""An engine of a head with one API server that hangs: its process is there, and answers nothing."""

import psutil
import pytest

from .load import Load
from .server import ASSIGNMENTS, IN_FLIGHT, MOVES, Server, until
from .suspended import keep_to_one_core

STREAMS = 4
LONG, SHORT = 900, 8


@pytest.mark.both_front_ends(newest=True)
def test_streams_of_a_stopped_engine_go_on_elsewhere_and_it_serves_again_when_it_answers(fleet: Server) -> None:
    engines, moves = fleet.engine_pids(), fleet.total(MOVES)
    # No stream is at its end before the last has begun.
    for pid in engines.values():
        keep_to_one_core(psutil.Process(pid))
    engine = psutil.Process(engines[0])
    with Load(fleet) as load:
        sent = [load.send(LONG, stream=True, temperature=0) for _ in range(STREAMS)]
        assert all(outcome.started.wait(60) for outcome in sent)
        engine.suspend()
        try:
            load.wait()
            assert fleet.replicas_up() == 1
        finally:
            engine.resume()
    assert [outcome for outcome in sent if not outcome.finished_whole] == []
    assert fleet.total(MOVES) == moves + STREAMS / 2
    until(lambda: fleet.replicas_up() == 2, "the engine is taken back")
    assert fleet.engine_pids() == engines
    before = fleet.by_replica(ASSIGNMENTS)
    with Load(fleet) as load:
        again = [load.send(SHORT, stream=True) for _ in range(STREAMS)]
    assert [outcome for outcome in again if not outcome.finished_whole] == []
    assert all(count > before[replica] for replica, count in fleet.by_replica(ASSIGNMENTS).items())
    assert set(fleet.by_replica(IN_FLIGHT).values()) == {0}
