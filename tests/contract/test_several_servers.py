"""Several API servers use vLLM's shared values."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from prometheus_client import values
from vllm.entrypoints.launchers import launcher
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.fleet_setup import fleet
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan, stage_plans
from vllm_omni_plugin.integration.processes import several_servers
from vllm_omni_plugin.integration.processes.api_servers import NOT_ACCEPTING
from vllm_omni_plugin.integration.processes.several_servers import ApiServerLauncher, serve_api_servers

from .pipeline_files import read, write_pipeline
from .stage_models import model


class Arguments:
    max_num_queued_reqs = 8


class StartedError(Exception):
    """Everything is ready to be started."""


class Supervised:
    """A supervisor up to where it would start engines and API servers, without a coordinator."""

    def __init__(self) -> None:
        self.plans: Sequence[StagePlan] = ()
        self.sockets = 0

    def open_fleet(self, options: OmniConfig, _plans: Sequence[StagePlan], _resources: ExitStack) -> OmniConfig:
        return options

    def plan(self, *arguments: Any) -> Sequence[StagePlan]:
        self.plans = stage_plans(*arguments)
        # Without replicas.
        return ()

    async def run_until_signal(self, *_arguments: Any) -> None:
        self.sockets = zmq.Context.instance().get(zmq.MAX_SOCKETS)
        raise StartedError

    def run(self, line: str) -> None:
        args, options = read(line)
        with pytest.raises(StartedError):
            serve_api_servers(args, options)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    supervised = Supervised()
    for variable in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_SIM_MULTI_NUMA"):
        # Set first, so that what is set here is taken back.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(several_servers, "setup_multiprocess_prometheus", lambda: None)
    monkeypatch.setattr(several_servers, "open_fleet", supervised.open_fleet)
    monkeypatch.setattr(several_servers, "stage_plans", supervised.plan)
    monkeypatch.setattr(several_servers, "run_until_signal", supervised.run_until_signal)
    with socket.socket() as listening:
        monkeypatch.setattr(several_servers, "setup_server", lambda _args, reuse_port: ("http://here", listening))
        yield supervised


def test_engines_of_every_stage_have_the_number_of_api_servers(
    supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the same number vLLM divides the cores of a CPU, unless the user does.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for name in ("thinker", "refiner"):
        model(tmp_path / name)
    file = write_pipeline(tmp_path)
    supervised.run(f"--omni-pipeline {file} --dtype float32 --enforce-eager --api-server-count 5")
    told = [plan.vllm_config.parallel_config._api_process_count for plan in supervised.plans]
    assert told == [5, 5]


def test_a_supervisor_may_open_as_many_sockets_as_its_replicas_need(
    supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = model(tmp_path / "model")
    with zmq.Context() as unused:
        monkeypatch.setattr(zmq.Context, "instance", lambda: unused)
        supervised.run(f"{where} --dtype float32 --enforce-eager --api-server-count 2 --omni-dp-size-local 30")
    assert supervised.sockets > 30 * 37


def test_the_coordinator_gets_each_stages_fingerprint_and_reserves_numbers_for_the_heads_own_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    def open_runtime(*_: Any, fingerprints: Any, reserved_numbers: int, **__: Any) -> SimpleNamespace:
        told.append((fingerprints, reserved_numbers))
        return SimpleNamespace(router_address="tcp://127.0.0.1:7500", close=lambda: None)

    monkeypatch.setattr(fleet, "OmniCoordinatorRuntime", open_runtime)
    plans: Any = [
        SimpleNamespace(stage_id=number, fingerprint={"model": name}, replicas=number + 1)
        for number, name in enumerate("ab")
    ]
    with ExitStack() as resources:
        several_servers.open_fleet(OmniConfig(), plans, resources)
    assert told == [({0: {"model": "a"}, 1: {"model": "b"}}, 3)]


def test_the_value_for_not_accepting_is_that_of_vllm() -> None:
    assert NOT_ACCEPTING == launcher._NOT_ACCEPTING


def test_the_counts_of_a_server_that_died_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    live: Any = values.MultiProcessValue(process_identifier=lambda: 17)
    live("gauge", "g", "g", (), (), "Help.", multiprocess_mode="livesum").set(3.0)
    processes = ApiServerLauncher(2, "http://here", None, Arguments(), lambda pid: None)  # type: ignore[arg-type]
    stats = [SharedAdmissionStats({"mp_admission_counters": processes.admitted}, 2, index) for index in range(2)]
    stats[0].set_num_requests(5)
    stats[1].set_num_requests(7)
    processes.clear_counts(1, 17)
    assert stats[0].get_num_requests() == 5
    assert os.listdir(tmp_path) == []
    live.close_all_files()
