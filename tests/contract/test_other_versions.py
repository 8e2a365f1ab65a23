"""Our flags with an unsupported vLLM: refused, unless the user allows it."""

from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.integration import flags
from vllm_omni_plugin.integration.processes import serve_command
from vllm_omni_plugin.vllm_api.versions import supported

REFUSAL = (
    "vllm serve: error: --omni-* flags: this version of vllm-omni-plugin needs vLLM 0.32 or 0.33, and this is 0.31.0\n"
)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses the command line of `vllm serve` with vLLM 0.31."""
    monkeypatch.setattr(supported, "installed_version", lambda: "0.31.0")
    monkeypatch.setattr(serve_command, "patch_serve_command", lambda: None)
    parser = FlexibleArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    for argument in ("model_tag", "--port", "--config"):
        serve.add_argument(argument)
    flags.add_group(serve)

    def parse_words(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["vllm", "serve", "m", *words])
        return parser.parse_args()

    return parse_words


@pytest.mark.parametrize("words", [("--omni-join",), ("--port", "1", "-oma", "h"), ("--omni_dp_size_local", "2")])
def test_the_first_of_our_flags_ends_the_command_with_one_line(
    parse: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == REFUSAL


def test_without_our_flags_nothing_is_logged(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--port", "1").port == "1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("--omni-any-vllm", "--omni-join"), ""),
        (("--omni-join", "--omni_any_vllm"), ""),
        (("--omni-join",), "omni-any-vllm: true\n"),
        ((), "omni-join: true\nomni-any-vllm: true\n"),
    ],
)
def test_omni_any_vllm_warns_once(
    parse: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, words: tuple[str, ...], file: str
) -> None:
    (config := tmp_path / "config.yaml").write_text(file)
    args = parse(*words, *(("--config", str(config)) if file else ()))
    assert args.omni_join
    assert args.omni_any_vllm
    assert [record.message for record in caplog.records if "Anything may go wrong" in record.message] == [
        "--omni-any-vllm: this version of vllm-omni-plugin needs vLLM 0.32 or 0.33, and this is 0.31.0. "
        "Anything may go wrong."
    ]
