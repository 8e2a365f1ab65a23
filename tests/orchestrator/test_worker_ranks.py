"""The ranks of workers that get weights from a trainer."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.errors import RanksUnknownError
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks


def pool(stage_id: int, replica_ids: tuple[int, ...], lost: int | None = None) -> Any:
    members = [
        SimpleNamespace(replica_id=each, name=f"{stage_id}.{each}", client=None if each == lost else object())
        for each in replica_ids
    ]
    return SimpleNamespace(stage_id=stage_id, members=tuple(members))


def ranks(*pools: Any, numbers: dict[int, range], size: int = 2, is_open: bool = False) -> WorkerRanks:
    return WorkerRanks(pools, numbers, dict.fromkeys(numbers, size), is_open)


def test_all_workers_of_all_replicas_are_counted() -> None:
    assert ranks(pool(0, (0, 1, 2)), numbers={0: range(3)}).count() == 6


def test_stages_with_the_model_are_counted_together() -> None:
    both = pool(0, (0, 1)), pool(1, (0,))
    assert ranks(*both, numbers={0: range(2), 1: range(2, 3)}).count() == 6


def test_workers_of_an_open_fleet_are_not_counted_and_the_error_says_what_to_do() -> None:
    with pytest.raises(RanksUnknownError, match=r"may join and leave .* without --omni-master-address"):
        ranks(pool(0, (0,)), numbers={0: range(1)}, is_open=True).count()


@pytest.mark.parametrize(
    ("pools", "numbers"),
    [
        pytest.param([pool(0, (0, 2))], {0: range(3)}, id="a removed replica"),
        pytest.param([pool(0, (0,)), pool(2, (0,))], {0: range(1), 2: range(2, 3)}, id="another stage in between"),
    ],
)
def test_ranks_with_gaps_are_an_error_that_names_them(pools: list[Any], numbers: dict[int, range]) -> None:
    with pytest.raises(RanksUnknownError, match="have the ranks 0, 1, 4, 5, and trainers need them without gaps"):
        ranks(*pools, numbers=numbers).count()


def connect(fleet: WorkerRanks, workers: int) -> None:
    """A trainer of one rank connects to so many workers."""
    fleet.check_call("init_weight_transfer_engine", {"init_info": {"world_size": workers + 1, "rank_offset": 1}})


def test_a_transfer_needs_the_number_of_workers_that_there_are() -> None:
    fleet = ranks(pool(0, (0, 1)), numbers={0: range(2)})
    connect(fleet, 4)
    with pytest.raises(RanksUnknownError, match="`world_size` - `rank_offset` is 2, but this fleet has 4 workers"):
        connect(fleet, 2)


def test_a_transfer_does_not_begin_without_a_replica_that_restarts() -> None:
    with pytest.raises(RanksUnknownError, match=r"Replica 0\.1 is not there now"):
        connect(ranks(pool(0, (0, 1), lost=1), numbers={0: range(2)}), 4)
