"""What makes two configurations the same to a fleet, with vLLM's real ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.contract.configs import vllm_config, write_model
from vllm_omni_plugin.replicas.agreement import differences
from vllm_omni_plugin.vllm_api.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def between(head: Any, replica: Any) -> list[str]:
    """Names of the fields in which two configurations differ."""
    return [line.partition(":")[0] for line in differences(fingerprint(head, 0), fingerprint(replica, 0))]


def test_the_same_model_at_another_path_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    assert between(vllm_config(model), vllm_config(copy)) == []


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("model.safetensors", "other weights", "model"),
        ("another.safetensors", "weights", "model"),
        ("tokenizer.json", "[]", "tokenizer"),
    ],
)
def test_other_content_is_another_model(model: Path, tmp_path: Path, file: str, content: str, field: str) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / file).write_text(content)
    assert between(vllm_config(model), vllm_config(other)) == [field]


def test_other_weights_of_the_same_size_are_another_model(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert between(vllm_config(model), vllm_config(other)) == ["model"]


def test_builds_of_one_version_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = fingerprint(vllm_config(model), 0)
    monkeypatch.setattr("vllm.__version__", "0.32.0+cu129")
    assert cpu["vLLM version"] == "0.32.0"
    assert fingerprint(vllm_config(model), 0) == cpu


def test_another_configuration_is_another_model(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", rope_theta=5.0)
    assert between(vllm_config(model), vllm_config(other)) == ["model"]


def test_a_chat_template_is_the_heads_own(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "hello"}))
    assert between(vllm_config(model), vllm_config(other)) == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"max_model_len": 128}, "max model length"),
        ({"enable_lora": True, "max_lora_rank": 8}, "LoRA"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs mode"),
        ({"revision": "old"}, "revision"),
    ],
)
def test_arguments_that_change_answers_differ(model: Path, arguments: dict[str, Any], field: str) -> None:
    assert between(vllm_config(model, dtype="float32"), vllm_config(model, **({"dtype": "float32"} | arguments))) == [
        field
    ]


def test_another_stage_differs(model: Path) -> None:
    config = vllm_config(model)
    assert differences(fingerprint(config, 0), fingerprint(config, 1)) == ["stage: head has 0, replica 1"]


def test_a_download_of_a_model_is_that_model_whatever_its_cache(tmp_path: Path) -> None:
    cache = write_model(tmp_path / "models--org--name" / "snapshots" / "0a1b")
    assert fingerprint(vllm_config(cache), 0)["model"] == "org/name"
