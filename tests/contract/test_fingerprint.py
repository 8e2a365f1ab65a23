"""Which differences between two of vLLM's configurations change the fingerprint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config import MultiModalConfig, PoolerConfig

from tests.contract.configs import LLAMA, vllm_config, write_model
from tools.wire_frames import FOLDER
from vllm_omni_plugin.replicas.replica_server.attached_heads import differences, is_other_generation
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint

COMMIT, OTHER = "0a1b" * 10, "2c3d" * 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def between(head: Any, replica: Any) -> list[str]:
    """Names of the fields in which two configurations differ."""
    return [line.partition(":")[0] for line in differences(fingerprint(head, 0), fingerprint(replica, 0))]


@pytest.mark.parametrize(
    ("file", "content", "fields"),
    [
        pytest.param("config.json", json.dumps(LLAMA), [], id="the same at another path"),
        pytest.param("config.json", json.dumps(LLAMA | {"rope_theta": 5.0}), ["revision"], id="another configuration"),
        pytest.param("model.safetensors", "other weights", ["revision"], id="other weights"),
        pytest.param("model.safetensors.index.json", "{}", ["revision"], id="an index"),
        pytest.param("another.safetensors", "weights", ["revision"], id="more weights"),
        pytest.param("tokenizer.json", "[]", ["tokenizer"], id="another vocabulary"),
        pytest.param("tokenizer_config.json", '{"chat_template": "hello"}', [], id="a chat template, the head's own"),
        pytest.param("training_args.bin", "state", [], id="what no loader reads beside the weights"),
    ],
)
def test_which_files_of_a_model_change_its_fingerprint(
    model: Path, tmp_path: Path, file: str, content: str, fields: list[str]
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / file).write_text(content)
    assert between(vllm_config(model), vllm_config(other)) == fields


def test_local_files_of_another_architecture_are_another_model_and_no_other_generation(
    model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", architectures=["MistralForCausalLM"], model_type="mistral")
    head, replica = fingerprint(vllm_config(model), 0), fingerprint(vllm_config(other), 0)
    assert (head["model"], replica["model"]) == ("local files of LlamaForCausalLM", "local files of MistralForCausalLM")
    assert not is_other_generation(head, replica)
    assert is_other_generation(head, head | {"revision": "local files 0123", "vLLM version": "0.1", "dtype": "float8"})


def test_no_field_of_a_version_before_is_renamed_or_gone(model: Path) -> None:
    # It would not be compared with that version's any more.
    recorded = (FOLDER / "generation-of-0.2.txt").read_text().splitlines()[0]
    fields = json.loads(recorded.partition(": ")[2])[0]["fingerprint"]
    assert fields.keys() <= fingerprint(vllm_config(model), 0).keys()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        ("0.32.0+cu129", "0.32.0"),
        ("0.32.0", "0.32.0"),
        ("0.32.1.dev5+gabc1234.rocm700", "0.32.1.dev5+gabc1234"),
        ("0.32.1.dev5+gabc1234.d20261101.precompiled", "0.32.1.dev5+gabc1234.d20261101"),
    ],
)
def test_builds_of_one_commit_for_other_hardware_are_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, build: str, told: str
) -> None:
    monkeypatch.setattr("vllm.__version__", build)
    assert fingerprint(vllm_config(model), 0)["vLLM version"] == told


@pytest.mark.parametrize("resolved", ["cpu_awq", "awq_marlin", None])
def test_a_quantized_checkpoint_is_the_same_under_whatever_name_a_platform_resolves(
    tmp_path: Path, resolved: str | None
) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    folder = write_model(tmp_path / "quantized", quantization_config=quantization)
    # vLLM reads the header of a quantized checkpoint's weights.
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = vllm_config(folder, dtype="bfloat16")
    config.model_config.quantization = resolved
    assert fingerprint(config, 0)["quantization"] == "awq"


@pytest.mark.parametrize("method", ["fp8", None])
def test_quantization_while_loading_is_told_as_vllm_names_it(model: Path, method: str | None) -> None:
    config = vllm_config(model)
    config.model_config.quantization = method
    assert fingerprint(config, 0)["quantization"] == str(method)


ONLINE = {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"quantization_config": {"linear": "fp8_per_block"}}, ["quantization config"]),
        ({"quantization_config": {"linear": "fp8_per_tensor", "ignore": ["lm_head"]}}, ["quantization config"]),
        ({"quantization_config": {"linear": {"weight": "fp8_per_tensor_static"}}}, []),
    ],
)
def test_quantization_while_loading_is_the_same_if_that_of_each_layer_is(
    model: Path, arguments: dict[str, Any], fields: list[str]
) -> None:
    assert between(vllm_config(model, **ONLINE), vllm_config(model, **(ONLINE | arguments))) == fields


@pytest.mark.parametrize(
    ("pooling", "fields"),
    [
        ({"seq_pooling_type": "MEAN"}, ["pooling"]),
        ({"use_activation": False}, ["pooling"]),
        pytest.param({"seq_pooling_type": "LAST"}, [], id="what the model has by default"),
        pytest.param({"enable_flash_late_interaction": False}, [], id="which kernel"),
        pytest.param({"max_embed_len": 8}, [], id="a limit of the head"),
    ],
)
def test_how_embeddings_are_pooled_must_be_the_same(model: Path, pooling: dict[str, Any], fields: list[str]) -> None:
    plain = {"runner": "pooling", "convert": "embed"}
    other = vllm_config(model, **plain, pooler_config=PoolerConfig(**pooling))
    assert between(vllm_config(model, **plain), other) == fields


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"code_revision": "other"}, ["code revision"]),
        ({"kv_cache_dtype_skip_layers": ["0"]}, ["KV cache dtype"]),
        ({"max_model_len": -1}, []),
        ({"max_model_len": 128}, ["max model length"]),
        ({"enable_lora": True, "max_lora_rank": 8}, ["LoRA"]),
        ({"enable_prompt_embeds": True}, ["prompt embeddings"]),
        ({"logprobs_mode": "processed_logprobs"}, ["logprobs mode"]),
        ({"use_fp64_gumbel": True}, ["sampling noise"]),
        ({"mamba_cache_dtype": "float32"}, ["Mamba cache dtype"]),
        pytest.param({"mamba_ssm_cache_dtype": "float32"}, [], id="what vLLM sets on some CPUs"),
        # A model in local files has no revision but these.
        ({"revision": "old"}, []),
        ({"load_format": "dummy"}, ["load format"]),
        ({"load_format": "safetensors"}, []),
        ({"hf_overrides": {"rope_theta": 7.0}}, ["hf-overrides"]),
        ({"kv_cache_dtype": "fp8"}, ["KV cache dtype"]),
        ({"logits_processors": ["package.module:Processor"]}, ["logits processors"]),
    ],
)
def test_which_arguments_change_the_fingerprint(model: Path, arguments: dict[str, Any], fields: list[str]) -> None:
    plain = {"dtype": "float32"}
    assert between(vllm_config(model, **plain), vllm_config(model, **(plain | arguments))) == fields


@pytest.mark.parametrize("where", [{"lora_target_modules": ["o_proj"]}, {"enable_tower_connector_lora": True}])
def test_adapters_must_apply_to_the_same_modules(model: Path, where: dict[str, Any]) -> None:
    assert between(vllm_config(model, enable_lora=True), vllm_config(model, enable_lora=True, **where)) == ["LoRA"]


@pytest.mark.parametrize(
    ("content", "fields"), [("of the first", []), ("of the second", ["hf-overrides", "multimodal"])]
)
def test_files_that_arguments_name_are_compared_by_what_is_in_them(
    model: Path, tmp_path: Path, content: str, fields: list[str]
) -> None:
    def config(name: str, content: str) -> Any:
        elsewhere, scales = write_model(tmp_path / name, made_by=content), tmp_path / f"{name}.json"
        scales.write_text(content)
        found = vllm_config(model, hf_config_path=str(elsewhere))
        found.model_config.multimodal_config = MultiModalConfig(
            mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)
        )
        return found

    assert between(config("one", "of the first"), config("two", content)) == fields


@pytest.mark.parametrize(("by_engine", "fields"), [(True, ["images are normalized"]), (False, [])])
def test_who_normalizes_images_must_be_the_same(model: Path, by_engine: bool, fields: list[str]) -> None:
    # vLLM's Rust front end does it itself, so the variable that asks for it must be set on nodes, too.
    head, replica = vllm_config(model), vllm_config(model)
    head.model_config.multimodal_config = MultiModalConfig(mm_device_do_normalize=False)
    replica.model_config.multimodal_config = MultiModalConfig(mm_device_do_normalize=by_engine)
    assert between(head, replica) == fields


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        pytest.param({"mm_encoder_attn_dtype": "fp8"}, ["multimodal"], id="a quantized encoder"),
        pytest.param({"video_pruning_rate": 0.5}, ["multimodal"], id="tokens that the engine drops"),
        pytest.param({"language_model_only": True}, ["multimodal"], id="no encoder"),
        pytest.param({"mm_processor_cache_gb": 1.0, "limit_per_prompt": {"image": 2}}, [], id="of the head"),
    ],
)
def test_what_the_engine_makes_of_images_must_be_the_same(
    model: Path, given: dict[str, Any], fields: list[str]
) -> None:
    head, replica = vllm_config(model), vllm_config(model)
    head.model_config.multimodal_config = MultiModalConfig()
    replica.model_config.multimodal_config = MultiModalConfig(**given)
    assert between(head, replica) == fields


def test_a_cached_model_is_identified_by_its_name_and_commit(tmp_path: Path) -> None:
    cache = write_model(tmp_path / "models--org--name" / "snapshots" / "0a1b")
    found = fingerprint(vllm_config(cache), 0)
    assert (found["model"], found["revision"]) == ("org/name", "0a1b")


class Hub:
    """A download cache in which `main` of a model is at some commit."""

    def __init__(self, folder: Path) -> None:
        self._repository = folder / "models--org--name"

    def snapshot(self, commit: str) -> Path:
        return write_model(self._repository / "snapshots" / commit)

    def online(self, commit: str, revision: str | None) -> Any:
        """vLLM's configuration of the model by its name, with `main` at this commit."""
        self.snapshot(commit)
        (self._repository / "refs").mkdir(parents=True, exist_ok=True)
        (self._repository / "refs" / "main").write_text(commit)
        return vllm_config("org/name", revision=revision)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # Nothing is asked of the hub, and yet the name is kept, as vLLM does where it may ask.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("vllm.engine.arg_utils.get_model_path", lambda name, revision=None: name)
    return Hub(tmp_path)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_model_on_the_hub_is_identified_by_the_resolved_commit(hub: Hub, revision: str | None) -> None:
    online = hub.online(COMMIT, revision)
    found = fingerprint(online, 0)
    assert (online.model_config.model, found["model"], found["revision"]) == ("org/name", "org/name", COMMIT)
    assert between(online, vllm_config(hub.snapshot(COMMIT))) == []
    expected = [f"revision: head has {COMMIT}, replica {OTHER}"]
    assert differences(found, fingerprint(hub.online(OTHER, None), 0)) == expected
    # Its branch has moved since, in a cache that several machines share.
    assert fingerprint(online, 0) == found


def test_a_model_with_weights_elsewhere_is_identified_by_their_address(model: Path) -> None:
    head, replica = vllm_config(model), vllm_config(model)
    replica.model_config.model_weights = "s3://bucket/weights"
    (line,) = differences(fingerprint(head, 0), fingerprint(replica, 0))
    assert line.endswith("with s3://bucket/weights")


def test_default_adapters_are_identified_by_their_files(model: Path, tmp_path: Path) -> None:
    configs = []
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"22")):
        adapter = tmp_path / name
        adapter.mkdir()
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        configs.append(vllm_config(model, enable_lora=True))
        configs[-1].lora_config.default_mm_loras = {"audio": str(adapter)}
    assert between(configs[0], configs[1]) == []
    assert between(configs[0], configs[2]) == ["LoRA"]
