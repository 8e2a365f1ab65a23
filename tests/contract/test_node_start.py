"""What a node of vLLM's does first: it asks its head, and only then lets vLLM configure the model, which takes long."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadInfo, HeadQueryResult
from vllm_omni_plugin.integration.checks import head_checks
from vllm_omni_plugin.integration.processes import headless
from vllm_omni_plugin.integration.processes.headless import serve_replicas
from vllm_omni_plugin.replicas.engine.engine_keeper import FirstStarts
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity

from .pipeline_files import JOIN, read


@pytest.fixture
def numbers() -> list[int]:
    """Of the replicas that were served."""
    return []


@pytest.fixture
def done(numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been done, in order; the node's model is "a"."""
    done: list[str] = []

    def plan(*_: Any) -> SimpleNamespace:
        done.append("planned")
        return SimpleNamespace(stage_id=0, fingerprint={"model": "a"})

    async def serve(_options: Any, _plan: Any, identities: Any, *_: Any, **_named: Any) -> None:
        done.append("served")
        numbers.extend(identity.number for identity in identities)

    monkeypatch.setattr(headless, "forbid_fork", lambda: None)
    monkeypatch.setattr(headless, "use_socket_folder", lambda: None)
    monkeypatch.setattr(headless, "plan_node", plan)
    monkeypatch.setattr(headless, "serve_node", serve)
    return done


@pytest.mark.parametrize(
    ("answer", "expected", "said"),
    [
        pytest.param(
            HeadQueryResult(problem="refused secret", refused=True),
            ["asked", "planned", "asked", "served"],
            "",
            id="another secret, or a proxy without a head",
        ),
        pytest.param(HeadQueryResult(HeadInfo(0.0, [1], {})), ["asked"], "the head has 1, replica 0", id="stage"),
        pytest.param(
            HeadQueryResult(HeadInfo(0.0, [0], {"model": "b"}, numbers=(0,))),
            ["asked", "planned"],
            "replica a",
            id="model",
        ),
        pytest.param(
            HeadQueryResult(HeadInfo(0.0, [0], {"model": "a"}, numbers=(0,))),
            ["asked", "planned", "served"],
            "",
            id="alike",
        ),
        pytest.param(
            HeadQueryResult(HeadInfo(0.0, [0], {"model": "a", "vLLM version": "0.1"}, numbers=(0,))),
            ["asked", "planned", "served"],
            "",
            id="another generation",
        ),
        pytest.param(HeadQueryResult(problem="not there"), ["asked", "planned", "asked", "served"], "", id="no head"),
    ],
)
def test_the_head_is_queried_before_the_model_is_configured(
    answer: HeadQueryResult,
    expected: list[str],
    said: str,
    done: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(*_: Any) -> HeadQueryResult:
        done.append("asked")
        return answer

    monkeypatch.setattr(head_checks, "query_head", ask)
    assert serve_replicas(*read(f"{tmp_path} --headless {JOIN}")) == (os.EX_TEMPFAIL if said else 0)
    assert done == expected
    assert said in capsys.readouterr().err


async def test_each_start_of_a_node_has_an_incarnation_of_its_own_for_engines_with_the_numbers_of_their_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[dict[str, Any]] = []
    shared: list[FirstStarts] = []

    async def run_node(servers: list[Any], *_: Any) -> None:
        assert len(servers) == 2

    monkeypatch.setattr(headless, "ReplicaServer", lambda *_, first_starts, **_named: shared.append(first_starts))
    monkeypatch.setattr(headless, "run_node", run_node)
    plan: Any = SimpleNamespace(
        stage_id=0, fingerprint={}, replicas=2, api=None, make_launcher=lambda _, **named: launched.append(named)
    )
    identities = [ReplicaIdentity(7, "node/7"), ReplicaIdentity(5, "node/5")]
    reaper: Any = SimpleNamespace(watch=None)
    for _ in range(2):
        await headless.serve_node(OmniConfig(), plan, identities, "127.0.0.1", "tcp://h:1", reaper=reaper)
    assert [named["numbers"] for named in launched] == [[7, 5]] * 2
    assert len({named["first_incarnation"] for named in launched} - {0}) == 2
    # One of a start's replicas that has served keeps the node from ending.
    assert shared[0] is shared[1] is not shared[2]


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([HeadQueryResult(HeadInfo(0.0, [0], {"model": "a"}, numbers=(7, 5)))], id="a head"),
        pytest.param(
            [HeadQueryResult(problem="not there"), HeadQueryResult(HeadInfo(0.0, [0], {"model": "a"}, numbers=(7, 5)))],
            id="a head that started meanwhile",
        ),
        pytest.param(
            [HeadQueryResult(HeadInfo(0.0, [0], {"model": "a"}, numbers=given)) for given in ((), (7, 5))],
            id="a head that has just started",
        ),
    ],
)
@pytest.mark.usefixtures("done")
def test_replicas_have_the_numbers_that_the_head_gives_to_their_host_slots(
    answers: list[HeadQueryResult], numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(*arguments: Any) -> HeadQueryResult:
        asked.append(arguments[-1])
        return answers[len(asked) - 1]

    monkeypatch.setattr(head_checks, "query_head", ask)
    assert serve_replicas(*read(f"{tmp_path} --headless {JOIN} --omni-dp-size-local 2")) == 0
    assert numbers == [7, 5]
    assert {len(set(names)) for names in asked} == {2}
    assert len(asked) == len(answers)
