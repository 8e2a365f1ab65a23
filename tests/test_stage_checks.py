"""`vllm-omni-plugin pipeline check`: what a file names is looked up, without vLLM and without a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_plugin.cli import main

STAGE = "stages:\n- {id: 0, name: writer, engine: vllm, model: m, output: text, final: true"
BROKEN = "raise RuntimeError('no such machine')"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pipeline.yaml"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param("policy: pefix", "stages[0].policy: unknown load balancing policy 'pefix'", id="policy"),
        pytest.param("policy_config: {x: 1}", "stages[0].policy_config: load balancing policy", id="policy's option"),
        pytest.param("transform: 'json:dumps'", "stages[0].transform: ", id="transform with other parameters"),
        pytest.param("transform: 'broken_module:f'", "no such machine", id="module that raises"),
    ],
)
def test_a_name_that_cannot_be_used_is_told_with_its_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: str, message: str
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    (file.parent / "broken_module.py").write_text(BROKEN)
    file.write_text(f"{STAGE}, {keys}}}\n")
    assert main(["pipeline", "check", str(file)]) == 1
    told = capsys.readouterr().err
    assert f"{file}:2: " in told
    assert message in told


def test_what_a_drawing_names_need_not_be_installed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"{STAGE}, policy: of.another:Machine}}\n")
    assert main(["pipeline", "check", str(file), "--mermaid"]) == 0
    assert "writer" in capsys.readouterr().out


def test_looking_up_imports_neither_vllm_nor_torch() -> None:
    module = "vllm_omni_plugin.integration.fleet_setup.stage_checks"
    script = f"import sys, {module}; print(sorted({{'vllm', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
