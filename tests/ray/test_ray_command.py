"""What `vllm-omni-plugin ray up` makes of its arguments."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.ray.ray_command import parse

HEAD = ("--omni-master-address", "10.0.0.1", "--omni-master-port", "7500")


def test_what_is_no_option_of_the_command_goes_to_vllm_in_its_order() -> None:
    args, serve = parse(["up", "M", "--replicas", "3", *HEAD, "-tp", "4", "--num-gpus", "4", "--dtype=half"])
    assert serve == ["M", *HEAD, "-tp", "4", "--dtype=half", "--headless"]
    assert (args.replicas, args.num_gpus, args.num_cpus, args.address) == (3, 4, 1, "auto")


def test_dashes_between_both_and_a_headless_of_the_users_change_nothing() -> None:
    _, serve = parse(["up", "--max-replicas", "3", "--", "M", "--headless", *HEAD])
    assert serve == ["M", "--headless", *HEAD]


def test_an_abbreviated_option_is_one_of_vllm() -> None:
    assert parse(["up", "M", "--rep", "3", *HEAD])[1][:3] == ["M", "--rep", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "M"], "--omni-master-address"),
        (["down", "M", *HEAD], "invalid choice: 'down'"),
        (["up", "M", *HEAD, "--replicas", "0"], "argument --replicas: 0 is below 1"),
        (["up", "M", *HEAD, "--replicas", "2", "--max-replicas", "3"], "not allowed with argument --replicas"),
        (["up", "M", *HEAD, "--min-replicas", "2"], "need --max-replicas"),
        (["up", "M", *HEAD, "--target-wait", "2"], "need --max-replicas"),
        (["up", "M", *HEAD, "--max-replicas", "2", "--min-replicas", "3"], "--max-replicas 2 is below"),
        (["up", "M", *HEAD, "--max-replicas", "2", "--target-wait", "0"], "argument --target-wait: it must be above 0"),
        (["up", "M", *HEAD, "--url", "head:8000"], "argument --url: 'head:8000'"),
        (["up", "M", *HEAD, "--omni-drain-timeout", "soon"], "argument --omni-drain-timeout: 'soon'"),
    ],
)
def test_wrong_usage_is_refused_by_name(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ray", *words])
    assert message in capsys.readouterr().err


def test_a_missing_ray_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", "up", "M", *HEAD]) == 1
    assert capsys.readouterr().err == (
        "vllm-omni-plugin: error: Ray is not installed: pip install 'vllm-omni-plugin[ray]'\n"
    )


def test_a_cluster_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\n")

    ray = ModuleType("ray")
    ray.__dict__.update(init=init, exceptions=SimpleNamespace(RayError=ValueError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert main(["ray", "up", "M", *HEAD, "--address", "h:1"]) == 1
    assert "argument --address: no Ray cluster at h:1: Could not find any" in capsys.readouterr().err
