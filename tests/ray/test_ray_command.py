"""The arguments and signals of `vllm-omni-plugin ray up`."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.errors import ServerUnavailableError
from vllm_omni_plugin.ray import ray_command
from vllm_omni_plugin.ray.autoscaler import StageLoad
from vllm_omni_plugin.ray.node_supervisor import NodeSupervisor
from vllm_omni_plugin.ray.ray_command import parse

HEAD = ("--omni-master-address", "10.0.0.1", "--omni-master-port", "7500")


def test_other_arguments_go_to_vllm_in_order() -> None:
    ((args, serve),) = parse(["up", "M", "--replicas", "3", *HEAD, "-tp", "4", "--num-gpus", "4", "--dtype=half"])
    assert serve == ["M", *HEAD, "-tp", "4", "--dtype=half", "--headless"]
    assert (args.replicas, args.num_gpus, args.num_cpus, args.address) == (3, 4, 1, "auto")


STAGES = ["--stage", "0", "--replicas", "2", "--stage=1", "--num-gpus", "4", "-tp", "4"]


def test_each_stage_has_its_options_and_arguments_and_those_of_all() -> None:
    words = ["up", "--omni-pipeline", "/p.yaml", "--num-cpus", "3", *HEAD, *STAGES, "--max-replicas", "8"]
    common = ["--omni-pipeline", "/p.yaml", *HEAD]
    (prefill, of_prefill), (decode, of_decode) = parse(words)
    assert of_prefill == [*common, "--omni-stage-id", "0", "--headless"]
    assert of_decode == [*common, "--omni-stage-id=1", "-tp", "4", "--headless"]
    given = [(args.replicas, args.max_replicas, args.num_gpus, args.num_cpus) for args in (prefill, decode)]
    assert given == [(2, None, 1, 3), (1, 8, 4, 3)]


def test_the_nodes_of_all_stages_are_one_supervisors(
    supervisors: list[NodeSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def nodes(*of: Any) -> SimpleNamespace:
        made.append(of)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(ray_command, "RayNodes", nodes)
    assert main(["ray", "up", "--address", "a:1", *HEAD, *STAGES]) == 0
    ((address, kinds),) = made
    assert (address, [(kind.gpus, kind.cpus) for kind in kinds]) == ("a:1", [(1, 1), (4, 1)])
    (supervisor,) = supervisors
    assert [(group.name, group.wanted(0.0)) for group in supervisor.groups] == [(" of stage 0", 2), (" of stage 1", 1)]
    started = [group.node_set.decide(0.0, 1) for group in supervisor.groups]
    assert [number for ((_, number),) in started] == [0, 1]


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeSupervisor]]:
    """The supervisors that the command makes, which do not run. Signal handlers are restored."""
    made: list[NodeSupervisor] = []
    monkeypatch.setattr(ray_command, "RayNodes", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(NodeSupervisor, "run", lambda self: not made.append(self))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield made
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_counted(supervisors: list[NodeSupervisor], number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    assert main(["ray", "up", "M", *HEAD]) == 0
    assert callable(signal.getsignal(number))
    os.kill(os.getpid(), number)
    assert supervisors[0].signals == 1


def test_sighup_ends_nothing(supervisors: list[NodeSupervisor]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert main(["ray", "up", "M", *HEAD]) == 0
    os.kill(os.getpid(), signal.SIGHUP)
    assert supervisors[0].signals == 0


@pytest.mark.parametrize("flag", ["--omni_drain_timeout", "--omni-drain"])
def test_flags_with_underscores_or_abbreviated_are_read_like_in_vllm(
    supervisors: list[NodeSupervisor], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    timeouts: list[float] = []
    monkeypatch.setattr(ray_command, "NodeSet", lambda timeout, _: timeouts.append(timeout))
    assert main(["ray", "up", "M", "--omni_master_address=a_b", *HEAD[2:], flag, "7"]) == 0
    assert timeouts == [7.0]
    ((_, serve),) = parse(["up", "M", "--omni_master_address=a_b", *HEAD[2:], flag, "7"])
    assert serve == ["M", "--omni_master_address=a_b", *HEAD[2:], flag, "7", "--headless"]


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (HEAD, "http://10.0.0.1:8000"),
        (["--omni_master_address=a_b", *HEAD[2:]], "http://a_b:8000"),
        (["-oma", "fd00::1", "-omp", "7500"], "http://[fd00::1]:8000"),
        ([*HEAD, "--url", "http://h:1"], "http://h:1"),
    ],
)
def test_the_load_comes_from_the_head_that_nodes_join_or_from_url(
    supervisors: list[NodeSupervisor], monkeypatch: pytest.MonkeyPatch, words: list[str], url: str
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(ray_command, "fetch_stage_load", lambda *of: asked.append(of) or StageLoad(1, 0.0))
    assert main(["ray", "up", "M", *words, "--max-replicas", "3", "--omni-stage-id", "2"]) == 0
    supervisors[0].groups[0].wanted(0.0)
    assert asked == [(url, 2)]


def test_an_unreachable_head_and_its_return_are_logged_once(
    supervisors: list[NodeSupervisor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", "up", "M", *HEAD, "--max-replicas", "3"]) == 0
    answers = [StageLoad(1, 0.0), None, None, StageLoad(1, 0.0), StageLoad(1, 4.0), None]

    def fetch_stage_load(url: str, stage: int) -> StageLoad:
        if load := answers.pop(0):
            return load
        raise ServerUnavailableError(f"{url} is away")

    monkeypatch.setattr(ray_command, "fetch_stage_load", fetch_stage_load)
    assert [supervisors[0].groups[0].wanted(float(now)) for now in range(6)] == [1, 1, 1, 1, 2, 2]
    away = "vllm-omni-plugin ray: http://10.0.0.1:8000 is away; the number of nodes stays\n"
    assert (
        capsys.readouterr().err
        == f"{away}vllm-omni-plugin ray: http://10.0.0.1:8000 reports the expected wait again\n{away}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "M"], "--omni-master-address"),
        (["up", "M", *HEAD[:2]], "--omni-master-port"),
        (["down", "M", *HEAD], "invalid choice: 'down'"),
        (["up", "M", *HEAD, "--replicas", "0"], "argument --replicas: 0 is below 1"),
        (["up", "M", *HEAD, "--replicas", "2", "--max-replicas", "3"], "not allowed with argument --replicas"),
        (["up", "M", *HEAD, "--min-replicas", "2"], "need --max-replicas"),
        (["up", "M", *HEAD, "--target-wait", "2"], "need --max-replicas"),
        (["up", "M", *HEAD, "--max-replicas", "2", "--min-replicas", "3"], "--max-replicas 2 is below"),
        (["up", "M", *HEAD, "--max-replicas", "2", "--target-wait", "0"], "argument --target-wait: it must be above 0"),
        (["up", "M", *HEAD, "--url", "head:8000"], "argument --url: 'head:8000'"),
        (["up", "M", *HEAD, "--omni-drain-timeout", "soon"], "argument --omni-drain-timeout: 'soon'"),
        (["up", *HEAD, "--stage", "1", "--stage=1"], "argument --stage: 1 is given twice"),
        (["up", *HEAD, "--stage"], "--stage-id: expected one argument"),
        (["up", *HEAD, "--stage", "x"], "--stage-id: 'x' is not a whole number"),
        (["up", *HEAD, "--stage", "0", "--stage", "1", "--address", "a:1"], "argument --address: all stages use one"),
        (["up", "M", *HEAD, "--omni_drain_timeut=9"], "--omni-drain-timeut (did you mean '--omni-drain-timeout'?)"),
        (["up", "M", *HEAD, "--nnodes=2"], "argument --nnodes: give --machines, and Ray chooses them"),
        (["up", "M", *HEAD, "--machines=2", "--node_rank=1"], "argument --node-rank: give --machines, and Ray chooses"),
        (["up", "M", *HEAD, "--machines=2", "--master-addr", "a"], "argument --master-addr: give --machines, and Ray"),
        (["up", "M", *HEAD, "--machines", "2", "--num-gpus=0", "--num-cpus=0"], "argument --machines: it needs"),
    ],
)
def test_wrong_usage_is_refused_by_name(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ray", *words])
    assert message in capsys.readouterr().err


def test_a_missing_ray_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", "up", "M", *HEAD]) == 1
    assert capsys.readouterr().err == (
        "vllm-omni-plugin: error: Ray is not installed: pip install 'vllm-omni-plugin[ray]'\n"
    )


def test_an_unreachable_cluster_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\n")

    ray = ModuleType("ray")
    ray.__dict__.update(init=init, exceptions=SimpleNamespace(RayError=ValueError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert main(["ray", "up", "M", *HEAD, "--address", "h:1"]) == 1
    assert "argument --address: no Ray cluster at h:1: Could not find any" in capsys.readouterr().err


def test_a_ray_that_lacks_a_module_does_not_count_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("import what_ray_needs")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_ray_needs"):
        main(["ray", "up", "M", *HEAD])
