"""An engine that answers every probe while its scheduler stands still."""

from pathlib import Path

import psutil
import pytest

from .conftest import stall_file
from .load import Load
from .nodes import NodeFleet
from .server import MOVES, until
from .suspended import keep_to_one_core

STREAMS, LONG, SHORT = 4, 900, 8
STALLS = "vllm_omni_fleet:replica_stalls_total"


@pytest.mark.both_front_ends
def test_its_streams_go_on_elsewhere_and_it_serves_again_once_it_computes_a_request_that_is_tried(
    nodes_of_both_kinds: NodeFleet, tiny_model: Path
) -> None:
    file = stall_file(tiny_model)
    head, engine = nodes_of_both_kinds.head, nodes_of_both_kinds.nodes[0].engine
    moves, stalls = head.total(MOVES), head.by_replica(STALLS)
    # No stream is at its end before the last has begun.
    for pid in (engine.pid, *head.engine_pids().values()):
        keep_to_one_core(psutil.Process(pid))
    try:
        with Load(head) as load:
            sent = [load.send(LONG, stream=True, temperature=0, prompt=f"{number} foxes") for number in range(STREAMS)]
            assert all(outcome.started.wait(60) for outcome in sent)
            file.write_text(str(engine.pid))
            load.wait()
        assert [outcome for outcome in sent if not outcome.finished_whole] == []
        assert head.total(MOVES) > moves
        local, remote = head.replicas().values()
        assert (local["status"], local["cordons"]) == ("up", [])
        assert (remote["status"], remote["cordons"]) == ("error", ["stall"])
        assert head.by_replica(STALLS) == {**stalls, "1": stalls["1"] + 1}
    finally:
        file.unlink(missing_ok=True)
    until(lambda: head.replicas_up() == 2, "it serves again")
    assert engine.is_running()
    before = head.replicas()["0.1"]["assigned"]
    with Load(head) as load:
        again = [load.send(SHORT, stream=True, prompt=f"{number} bears") for number in range(STREAMS)]
    assert [outcome for outcome in again if not outcome.finished_whole] == []
    assert head.replicas()["0.1"]["assigned"] > before
