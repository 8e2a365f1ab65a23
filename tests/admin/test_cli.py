"""The command `vllm-omni-plugin` against a fake server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.http_server import FakeServer
from vllm_omni_plugin import cli
from vllm_omni_plugin.cli import main
from vllm_omni_plugin.cli_values import http_url
from vllm_omni_plugin.vllm_api.versions.supported import RANGE

SPEECH = Path(__file__).parents[2] / "examples" / "pipelines" / "speech.yaml"
OF_REPLICA = (
    *("id", "status", "cordons", "remote", "input_addr"),
    *("total_in_flight", "assigned", "restarts", "since_seconds"),
)
REPLICAS = [
    dict(zip(OF_REPLICA, values, strict=True))
    for values in (
        ("0.0", "up", [], False, "ipc:///a", 12, 100, 0, 61.4),
        ("0.10", "draining", ["admin", "late"], True, "", 0, 0, 3, None),
    )
]
TABLE = """\
ID    STATUS    WHERE   IN FLIGHT  ASSIGNED  RESTARTS  SINCE  CORDONS      ADDRESS
0.0   up        local   12         100       0         61 s   -            ipc:///a
0.10  draining  remote  0          0         3         -      admin, late  -
"""
RECORDED_0_1 = {
    "replicas": [
        {
            "id": "0.1",
            "stage": 0,
            "replica": 1,
            "status": "draining",
            "held_back": ["admin"],
            "remote": True,
            "input_addr": "tcp://a:1",
            "output_addr": "tcp://a:2",
            "in_flight": 12,
            "dispatched": 100,
            "restarts": 3,
            "since_seconds": 61.4,
        }
    ]
}
OF_CANDIDATE = ["replica", "score", "matched_tokens", "requests", "prefill_tokens", "decode_tokens", "kv_usage"]
DECISION = {
    "policy": "kv-aware",
    "reason": "match",
    "fallback": "",
    "chosen": "0.10",
    "prompt_tokens": 480,
    "candidates": [
        dict(zip(OF_CANDIDATE, ("0.0", None, 0, 12, 2048, 100, 0.875), strict=True)),
        dict(zip(OF_CANDIDATE, ("0.10", 12.345678901, 464, 0, 0, 0, 0.0), strict=True)),
    ],
}
EXPLAINED = """\
480 tokens would go to replica 0.10 (kv-aware: match)
REPLICA  SCORE    MATCHED  REQUESTS  PREFILL TOKENS  DECODE TOKENS  KV USAGE
0.0      inf      0        12        2048            100            0.875
0.10     12.3457  464      0         0               0              0
"""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """Answers every request with the replicas by default."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("OMNI_ADMIN_KEY", raising=False)
    with FakeServer((200, {"replicas": REPLICAS})) as head:
        yield head


def test_ls_prints_an_aligned_table(head: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "ls", "--url", head.url]) == 0
    assert capsys.readouterr().out == TABLE
    assert head.asked == [("GET", "/omni/replicas", None)]


def test_a_replica_of_another_generation_is_listed_with_its_difference(
    head: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"status": "other-generation", "input_addr": "tcp://a:1", "other_generation": "dtype: a, \x1b[2Jb"}
    other = REPLICAS[1] | told
    head.answers["GET", "/omni/replicas"] = (200, {"replicas": [other]})
    assert main(["replicas", "ls", "--url", head.url]) == 0
    shown = " ".join(capsys.readouterr().out.splitlines()[1].split())
    # Words of a node do not control the terminal.
    assert shown == "0.10 other-generation remote 0 0 3 - admin, late tcp://a:1 dtype: a, ?[2Jb"


def test_the_names_of_version_0_1_are_read_too(head: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    head.answers["GET", "/omni/replicas"] = (200, RECORDED_0_1)
    assert main(["replicas", "ls", "--url", head.url]) == 0
    shown = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert shown == "0.1 draining remote 12 100 3 61 s admin tcp://a:1"


def test_a_replica_over_several_machines_is_shown_with_the_other_ones(
    head: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    head.answers["GET", "/omni/replicas"] = (200, {"replicas": [REPLICAS[0] | {"machines": ["a", "10.0.0.2", "c"]}]})
    assert main(["replicas", "ls", "--url", head.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(" ipc:///a, 10.0.0.2, c")


def test_ls_prints_json_when_asked(head: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "ls", "--url", f"{head.url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"replicas": REPLICAS}


@pytest.mark.parametrize("action", ["drain", "resume"])
def test_a_change_is_made_and_shown(head: FakeServer, capsys: pytest.CaptureFixture[str], action: str) -> None:
    head.answers["POST", f"/omni/replicas/0.10/{action}"] = (204, b"")
    assert main(["replicas", action, "0.10", "--url", head.url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ID", "0.10"]
    assert head.asked[0] == ("POST", f"/omni/replicas/0.10/{action}", None)


def test_a_decision_is_explained_with_its_candidates(head: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    head.answers["POST", "/omni/explain"] = (200, DECISION)
    assert main(["explain", "a & b?", "--session", "s", "--url", head.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == EXPLAINED
    assert head.asked == [("POST", "/omni/explain", "Bearer k")]
    assert head.bodies == [{"prompt": "a & b?", "session": "s"}]


@pytest.mark.parametrize("id_", ["", "7", "0.1/../0.0", "../x?y", "0.\u0661", "\udcff", "0.1\n"])
def test_what_is_no_id_of_a_replica_is_not_sent(head: FakeServer, capsys: pytest.CaptureFixture[str], id_: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replicas", "drain", id_, "--url", head.url])
    assert "is not <stage>.<replica>, as `replicas ls` lists them" in capsys.readouterr().err
    assert head.asked == []


@pytest.mark.parametrize("command", [["replicas", "ls"], ["top", "--once"], ["explain", "x"]])
def test_a_key_that_http_does_not_allow_is_not_shown(
    head: FakeServer, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--url", head.url, "--api-key", "secret-of-ours\n"]) == 1
    error = capsys.readouterr().err
    assert "VLLM_API_KEY" in error
    assert "secret" not in error
    assert head.asked == []


def test_changes_use_the_admin_key_and_reads_the_api_key(head: FakeServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\nadmin-key-number-1\nadmin-key-number-2\n")
    main(["replicas", "drain", "0.0", "--url", head.url, "--admin-key-file", str(keys), "--api-key", "api"])
    main(["explain", "x", "--url", head.url, "--admin-key-file", str(keys)])
    main(["replicas", "ls", "--url", head.url, "--admin-key-file", str(keys)])
    assert head.asked == [
        ("POST", "/omni/replicas/0.0/drain", "Bearer admin-key-number-1"),
        ("GET", "/omni/replicas", "Bearer api"),
        ("POST", "/omni/explain", "Bearer admin-key-number-1"),
        ("GET", "/omni/replicas", "Bearer admin-key-number-1"),
    ]


@pytest.mark.parametrize(("key", "fault"), [([], "wants a key"), (["--api-key", "x"], "does not accept this key")])
def test_a_401_names_the_flag(head: FakeServer, capsys: pytest.CaptureFixture[str], key: list[str], fault: str) -> None:
    head.answers["GET", "/omni/replicas"] = (401, {"error": "Unauthorized"})
    assert main(["replicas", "ls", "--url", head.url, *key]) == 1
    error = capsys.readouterr().err
    assert fault in error
    assert "--api-key" in error
    assert "--admin-key-file" in error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"error": {"message": "There is no replica 0.7. There are: 0.0."}},
            "There is no replica 0.7. There are: 0.0.",
        ),
        ({"error": {"message": "\x1b[2Ja\nb"}}, "?[2Ja b"),
        ({"error": "text"}, "Conflict"),
        (b"<html>", "Conflict"),
    ],
)
def test_a_refusal_shows_the_servers_message(
    head: FakeServer, capsys: pytest.CaptureFixture[str], body: Any, message: str
) -> None:
    head.answers["POST", "/omni/replicas/0.7/drain"] = (409, body)
    assert main(["replicas", "drain", "0.7", "--url", head.url]) == 1
    assert capsys.readouterr().err == f"vllm-omni-plugin: error: {head.url} answers 409: {message}\n"


@pytest.mark.parametrize("body", [b"", {"error": {"message": "Not Found"}}, {"detail": "Not Found"}])
def test_a_server_without_the_routes_may_have_them_at_another_port(
    head: FakeServer, capsys: pytest.CaptureFixture[str], body: Any
) -> None:
    head.default = (404, body)
    for command in (["replicas", "ls"], ["top", "--once"], ["explain", "x"]):
        assert main([*command, "--url", head.url]) == 1
        assert f"{head.url} has no such route" in (error := capsys.readouterr().err)
        assert "--omni-admin-port" in error


@pytest.mark.parametrize("command", [["ls"], ["drain", "0.1"]])
def test_a_key_is_not_sent_to_a_redirect_target(
    head: FakeServer, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    head.redirect = "http://127.0.0.1:1"
    assert main(["replicas", *command, "--url", head.url, "--api-key", "k"]) == 1
    error = capsys.readouterr().err
    assert f"{head.url} redirects to http://127.0.0.1:1/omni/replicas" in error
    assert "--url" in error


@pytest.mark.parametrize("body", [b"<html>", b"\xff", [], {"replicas": 1}, {"replicas": [1]}, {}])
def test_an_answer_of_another_kind_of_server_is_reported(
    head: FakeServer, capsys: pytest.CaptureFixture[str], body: Any
) -> None:
    head.answers["GET", "/omni/replicas"] = head.answers["POST", "/omni/explain"] = (200, body)
    for command in (["replicas", "ls"], ["explain", "x"]):
        assert main([*command, "--url", head.url]) == 1
        assert f"{head.url} answers, but it is not the server of a fleet" in capsys.readouterr().err


def test_an_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as closed:
        url = closed.url
    assert main(["replicas", "ls", "--url", url]) == 1
    error = capsys.readouterr().err
    assert f"no answer from {url}" in error
    assert "refused" in error


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "COMMAND"),
        (["replicas"], "ACTION"),
        (["replicas", "drain"], "ID"),
        (["explain"], "PROMPT"),
        (["replicas", "ls", "--url", "localhost:8000"], "argument --url"),
        (["replicas", "ls", "--url", "file:///etc/passwd"], "argument --url"),
        (["replicas", "ls", "--url", "http://"], "argument --url"),
        (["replicas", "ls", "--url", "http://[::1"], "argument --url"),
        (["replicas", "ls", "--url", "http://localhost:a"], "argument --url"),
        (["replicas", "ls", "--url", "http://a..b:8000"], "argument --url"),
        (["replicas", "ls", "--url", "http://127.0.0.1:73536"], "argument --url"),
    ],
)
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("doctor", "vllm_omni_plugin.integration.doctor.run_doctor"),
        ("sim", "vllm_omni_plugin.sim.sim_command.run_sim"),
        ("ray", "vllm_omni_plugin.ray.ray_command.run_ray"),
    ],
)
def test_commands_with_vllms_arguments_parse_their_own_arguments(
    command: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[str]] = []
    monkeypatch.setattr(runs, lambda arguments: taken.append(arguments) or 3)
    given = ["M", "--replicas", "3", "--help", "-omp", "1", "--version", "--config", "f"]
    assert main([command, *given]) == 3
    assert taken == [given]


def test_operating_a_fleet_loads_neither_vllm_nor_torch_nor_a_web_framework() -> None:
    heavy = ("vllm", "torch", "fastapi", "zmq", "msgspec", "yaml", "jsonschema", "vllm_omni_plugin.sim")
    script = (
        "import sys; from vllm_omni_plugin.cli import main; code = main(sys.argv[1:]); "
        f"print(code, [name for name in {heavy!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, "replicas", "ls", "--url", "http://127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1 []"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["replicas", "ls"], 0),
        (["replicas", "ls", "--json"], 0),
        (["replicas", "drain", "0.0"], 0),
        pytest.param(["pipeline", "check", str(SPEECH), "--mermaid"], 1, id="a check, which is not done"),
    ],
)
def test_a_reader_that_has_closed_its_pipe_is_no_traceback(head: FakeServer, arguments: list[str], status: int) -> None:
    head.answers["POST", "/omni/replicas/0.0/drain"] = (204, b"")
    reader, writer = os.pipe()
    os.close(reader)
    program = str(Path(sys.executable).with_name("vllm-omni-plugin"))
    command = [program, *arguments, *(["--url", head.url] if not status else [])]
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (status, "")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://localhost", "http://127.0.0.1"),
        ("http://localhost:8001/", "http://127.0.0.1:8001"),
        ("http://localhost.example.org", "http://localhost.example.org"),
        ("http://localhost-2:8001", "http://localhost-2:8001"),
    ],
)
def test_only_the_name_localhost_is_an_address_of_this_machine(given: str, asked: str) -> None:
    assert http_url(given) == asked


def test_a_broken_pipe_that_is_not_the_output_is_not_taken_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_actor(_: list[str]) -> int:
        raise BrokenPipeError("the actor has gone")

    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr("vllm_omni_plugin.ray.ray_command.run_ray", lose_actor)
        with pytest.raises(BrokenPipeError, match="the actor"):
            main(["ray", "up"])


def test_ctrl_c_during_a_wait_for_the_server_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("urllib.request.OpenerDirector.open", interrupt)
    assert main(["replicas", "ls"]) == 130


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
def test_a_server_on_this_machine_is_asked_without_a_proxy(
    head: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for url in (head.url, head.url.replace("127.0.0.1", "localhost")):
        assert main(["replicas", "ls", "--url", url]) == 0
        assert capsys.readouterr().out == TABLE


def test_another_host_is_asked_through_the_proxy_of_the_environment(
    head: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", head.url)
    head.answers["GET", "http://head.example/omni/replicas"] = (200, {"replicas": []})
    assert main(["replicas", "ls", "--url", "http://head.example"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("0.32.0+cpu", f"vLLM 0.32.0+cpu (supported: {RANGE})"),
        ("0.31.2", f"vLLM 0.31.2, which is not supported (supported: {RANGE})"),
        ("", f"no distribution named vllm is installed (supported: {RANGE})"),
    ],
)
def test_versions_are_printed_with_the_supported_range(
    installed: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "installed_version", lambda: installed)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm-omni-plugin {version('vllm-omni-plugin')}\n{expected}\n"
