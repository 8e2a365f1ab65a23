"""`vllm-omni-plugin --version`."""

from importlib.metadata import version

import pytest

from vllm_omni_plugin import cli
from vllm_omni_plugin.cli import main
from vllm_omni_plugin.vllm_api.versions.supported import RANGE


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
