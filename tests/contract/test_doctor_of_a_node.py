"""`vllm-omni-plugin doctor` with the command line of a node: which model and stage it compares with the head's."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.cli import main
from vllm_omni_plugin.config import FLAGS, OmniConfig
from vllm_omni_plugin.coordinator import HeadInfo, HeadQueryResult
from vllm_omni_plugin.integration import doctor
from vllm_omni_plugin.integration.checks import machine_checks
from vllm_omni_plugin.integration.flags import parse_fleet_flags
from vllm_omni_plugin.integration.processes import headless
from vllm_omni_plugin.sim.sim_command import run_sim
from vllm_omni_plugin.vllm_api.versions.serve_arguments import parse_headless_args


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[OmniConfig]:
    """With what options the head, which has another model, was asked."""
    asked: list[OmniConfig] = []

    def ask(coordinator: str, options: OmniConfig) -> HeadQueryResult:
        asked.append(options)
        return HeadQueryResult(HeadInfo(0.0, [0], {"model": "theirs"}))

    monkeypatch.setattr(doctor, "query_head_for_node", ask)
    return asked


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, asked: list[OmniConfig]) -> list[str]:
    """The models that vLLM was to configure after the head was asked."""
    planned: list[str] = []

    def plan(args: Any, options: Any) -> SimpleNamespace:
        assert asked
        planned.append(args.model)
        return SimpleNamespace(fingerprint={"model": args.model})

    monkeypatch.setattr(headless, "plan_node", plan)
    return planned


@pytest.mark.parametrize("given", [("mine",), ("--model", "mine"), ("--config", "FILE")])
def test_a_model_is_compared_however_it_is_named(
    given: tuple[str, ...], planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: mine\n")
    assert main(["doctor", *(str(file) if word == "FILE" else word for word in given), "--against", "127.0.0.1:9"]) == 1
    assert planned == ["mine"]
    assert "head has theirs, replica mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rank", "address", "told"),
    [
        ("0", "192.0.2.1", "error      machines: argument --master-addr: the first machine, --node-rank 0, waits for"),
        ("0", "127.0.0.1", "ok         machines: the others can meet this one at 127.0.0.1 port 0"),
        ("1", "no.such.name.", "not known  machines: argument --master-addr"),
    ],
)
def test_where_the_machines_of_a_replica_meet_is_checked(
    rank: str, address: str, told: str, planned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = ["--nnodes", "2", "--node-rank", rank, "--master-addr", address, "--master-port", str(port)]
    main(["doctor", "mine", "-tp", "2", *place, "--against", "127.0.0.1:9"])
    assert told.replace("port 0", f"port {port}") in capsys.readouterr().out


@pytest.mark.parametrize("where", ["command line", "command line beside a file", "file"])
def test_the_head_is_queried_once_with_the_secret_wherever_it_is_named(
    where: str, planned: list[str], asked: list[OmniConfig], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the secret of the fleet")
    file = tmp_path / "config.yaml"
    file.write_text(f"omni-secret-file: {secret}\n" if where == "file" else "seed: 1\n")
    named = () if where == "file" else ("--omni_secret_file", str(secret))
    config = () if where == "command line" else ("--config", str(file))
    main(["doctor", "mine", *config, *named, "--against", "127.0.0.1:9"])
    assert [options.secret_file for options in asked] == [str(secret)]


def test_a_pipeline_is_checked_also_without_flags_of_vllm(
    asked: list[OmniConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--against", "127.0.0.1:9", "--omni-pipeline", str(tmp_path / "none.yaml")]) == 1
    assert "error      flags: " in capsys.readouterr().out
    assert len(asked) == 1


def test_flags_that_exclude_each_other_are_an_error_before_the_head_is_queried(
    asked: list[OmniConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "mine", "--against", "127.0.0.1:9", "--omni-lb-policy", "random"]) == 1
    assert "error      flags: argument --omni-lb-policy: not allowed with --headless" in capsys.readouterr().out
    assert asked == []


def test_without_a_model_the_stage_alone_is_compared(planned: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--against", "127.0.0.1:9"]) == 0
    assert "not known  model: none was named" in capsys.readouterr().out
    assert main(["doctor", "--against", "127.0.0.1:9", "--omni-stage-id", "1"]) == 1
    assert "stage: the head has 0, replica 1" in capsys.readouterr().out
    assert planned == []


def test_an_unsupported_vllm_that_is_accepted_is_a_warning_and_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch, planned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_checks, "why_unsupported", lambda version: "too new")
    main(["doctor", "mine", "--omni-any-vllm", "--against", "127.0.0.1:9"])
    assert "warning    vLLM: too new; with --omni-any-vllm" in capsys.readouterr().out
    assert planned == ["mine"]


VALUES = {"N": "3", "PORT": "7500", "SECONDS": "2.5", "MIB": "7", "JSON": '{"a": 1}', "FIRST-LAST": "1-9"}


@pytest.mark.parametrize("spell", ["as it is", "by an alias", "with underscores", "with an equals sign"])
def test_our_flags_are_read_as_vllm_reads_them(spell: str) -> None:
    words = ["MODEL", "-tp", "2"]
    for flag in FLAGS:
        name = flag.aliases[0] if flag.aliases and spell == "by an alias" else flag.name
        if spell == "with underscores":
            name = f"--{name[2:].replace('-', '_')}"
        value = [VALUES.get(flag.metavar, "x_y")] if flag.takes_value else []
        words += [f"{name}={value[0]}"] if value and spell == "with an equals sign" else [name, *value]
    ours, others = parse_fleet_flags([*words, "--seed", "1"], "doctor")
    args = parse_headless_args([*words, "--seed", "1"], "doctor", "", "", lambda parser: None)
    assert ours == {flag.field: getattr(args, flag.destination) for flag in FLAGS}
    assert None not in ours.values()
    assert others == ["MODEL", "-tp", "2", "--seed", "1"]


def test_a_flag_that_is_cut_short_is_read_as_vllm_reads_it() -> None:
    assert parse_fleet_flags(["--omni-sec", "x"], "doctor") == ({"secret_file": "x"}, [])
    assert parse_headless_args(["--omni-sec", "x"], "doctor", "", "", lambda parser: None).omni_secret_file == "x"


def test_an_unknown_argument_is_one_line_after_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_headless_args(["MODEL", "--no-such-flag"], "vllm-omni-plugin doctor", "", "", lambda parser: None)
    *usage, error = capsys.readouterr().err.splitlines()
    assert error == "vllm-omni-plugin doctor: error: unrecognized arguments: --no-such-flag"
    assert len(usage) < 3


def test_simulated_replicas_without_a_head_blame_flags_of_their_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_sim(["MODEL", "--replicas", "2"])
    *_, error = capsys.readouterr().err.splitlines()
    assert error == (
        "vllm-omni-plugin sim: error: argument --omni-master-address: a node needs it, and --omni-master-port: the "
        "address of the head to join"
    )
