"""The parts of a configuration that must be the same on a head and a replica, so that their answers are the same."""

import json
import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import vllm
from huggingface_hub import ResolvedRevision

from vllm_omni_plugin.vllm_api.engine_messages.adapter import adapter_digest, digest, names_and_sizes
from vllm_omni_plugin.vllm_api.engine_messages.moving import PROCESSOR_PLUGINS

_HUB_CACHE_PREFIX = "models--"
_HUB_SNAPSHOTS = "snapshots"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors"))
"""vLLM loads the first kind that exists. Other files, such as the state of a training, are not part of the model."""
_VOCABULARY = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "tekken.json", "*.tiktoken")
_SAME_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read the usual files of a checkpoint."""
_OF_IMAGES = ("language_model_only", "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method")
"""What of the multimodal configuration changes what an engine computes, beside who normalizes."""
_PLATFORM = re.compile(r"cpu|cu\d+|rocm\d*|xpu|tpu|empty|precompiled")
_LONGEST_TEXT = 200
_NOT_IN_VECTORS = ("pooling_type", "enable_flash_late_interaction", "enable_chunked_processing", "max_embed_len")
"""What of the pooler's configuration says the same as another field, chooses a kernel, or is of the front end."""
_LOCAL = "local files "


def fingerprint(vllm_config: Any, stage_id: int) -> dict[str, str]:
    """The fields that `attached_heads.differences` compares, as text for operators. Reads files.

    A field without which other versions of this plugin run is not compared with theirs; its name never changes.

    A model or tokenizer of the hub is identified by its name and commit, a local one by its content, since paths differ
    between nodes: its architecture counts as its name, its files as its revision.
    """
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    name = _identity(model.model, _model_digest)
    is_local = name.startswith(_LOCAL)
    cache, skipped = vllm_config.cache_config, vllm_config.cache_config.kv_cache_dtype_skip_layers
    return {
        "stage": str(stage_id),
        "vLLM version": _build(vllm.__version__),
        "model": f"local files of {', '.join(model.model_arch_config.architectures or ())}" if is_local else name,
        "revision": (name if is_local else _commit(model) or str(model.revision))
        + (f" with {model.model_weights}" if model.model_weights else ""),
        "code revision": str(model.code_revision),
        "load format": "auto" if load_format in _SAME_FILES else load_format,
        "hf-overrides": _overrides(model.hf_overrides)
        + (f" of {_identity(model.hf_config_path, _model_digest)}" if model.hf_config_path else ""),
        "tokenizer": _identity(model.tokenizer, _tokenizer_digest),
        "tokenizer mode": str(model.tokenizer_mode),
        "runner": f"{model.runner_type}, convert {model.convert_type}",
        "pooling": _pooling(model.pooler_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "KV cache dtype": _short(f"{cache.cache_dtype}{f', but not of layers {sorted(skipped)}' if skipped else ''}"),
        # Without that of the state alone, which vLLM's builds for CPUs set for any model: a head may run on one.
        "Mamba cache dtype": str(cache.mamba_cache_dtype),
        "quantization": _quantization(model),
        "quantization config": _short(str(model.quantization_config)),
        "max model length": str(model.max_model_len),
        # Without it an engine computes a prompt of embeddings from the tokens that such a prompt does not have.
        "prompt embeddings": str(model.enable_prompt_embeds),
        "images are normalized": _normalizes(model.multimodal_config),
        "multimodal": _multimodal(model.multimodal_config),
        "logprobs mode": str(model.logprobs_mode),
        # With a seed, other noise is another answer.
        "sampling noise": "float64" if model.use_fp64_gumbel else "float32",
        "logits processors": _logits_processors(model.logits_processors),
        "LoRA": _lora(vllm_config.lora_config),
    }


def _build(version: str) -> str:
    """The version without the hardware it was built for: a head on a CPU may serve engines on GPUs."""
    public, _, local = version.partition("+")
    kept = [part for part in local.split(".") if part and not _PLATFORM.fullmatch(part)]
    return "+".join([public, ".".join(kept)]) if kept else public


def _quantization(model: Any) -> str:
    """The checkpoint's own method: which of its kernels vLLM resolves from it depends on the platform."""
    checkpoint = model.model_arch_config.quantization_config or {}
    return str(checkpoint.get("quant_method") or model.quantization)


def _pooling(config: Any) -> str:
    if config is None:
        return "none"
    return _short(json.dumps({name: value for name, value in vars(config).items() if name not in _NOT_IN_VECTORS}))


def _overrides(overrides: Any) -> str:
    if not overrides:
        return "none"
    if callable(overrides):
        return _name(overrides)
    return _short(json.dumps(overrides, sort_keys=True, default=str))


def _normalizes(multimodal: Any) -> str:
    """Where: both or neither would do it otherwise. A front end does it where `VLLM_USE_RUST_FRONTEND` is set."""
    return "by the engine" if multimodal is not None and multimodal.mm_device_do_normalize else "by the front end"


def _multimodal(config: Any) -> str:
    compared = {name: getattr(config, name, None) for name in _OF_IMAGES}
    if path := getattr(config, "mm_encoder_fp8_scale_path", None):
        compared["scales"] = _identity(path, lambda file: digest([file.read_bytes()]))
    return _short(str(compared))


def _logits_processors(configured: Any) -> str:
    names = [each if isinstance(each, str) else _name(each) for each in configured or ()]
    installed = sorted(plugin.value for plugin in entry_points(group=PROCESSOR_PLUGINS))
    return _short(", ".join(names + installed)) or "none"


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"digest {digest([text.encode()])}"


def _lora(config: Any) -> str:
    if config is None:
        return "off"
    kind = str(config.lora_dtype).removeprefix("torch.")
    adapters = {what: _identity(path, adapter_digest) for what, path in (config.default_mm_loras or {}).items()}
    always = f", always {_short(str(sorted(adapters.items())))}" if adapters else ""
    where = f", only in {_short(str(sorted(config.target_modules)))}" if config.target_modules else ""
    where += ", also in encoders" if config.enable_tower_connector_lora else ""
    return f"at most {config.max_loras} adapters of rank {config.max_lora_rank} in {kind}{always}{where}"


def _commit(model: Any) -> str:
    """The commit of a model on the hub, whatever branch or tag was asked for; "" if it is not known."""
    parts = Path(model.model).parts
    if any(part.startswith(_HUB_CACHE_PREFIX) for part in parts) and _HUB_SNAPSHOTS in parts[:-1]:
        return parts[parts.index(_HUB_SNAPSHOTS) + 1]
    return model.revision.resolved if isinstance(model.revision, ResolvedRevision) else ""


def _identity(name: str, digest_of: Callable[[Path], str]) -> str:
    """What must be equal: the name on the hub, or a local folder's digest."""
    path = Path(name)
    if not path.exists():
        return name
    # Offline, vLLM replaces the name by the folder of its download cache.
    hub_name = next((part for part in path.parts if part.startswith(_HUB_CACHE_PREFIX)), None)
    if hub_name is not None:
        return hub_name.removeprefix(_HUB_CACHE_PREFIX).replace("--", "/")
    return _LOCAL + digest_of(path)


def _model_digest(path: Path) -> str:
    """A digest of config.json and of the weights' index; without an index, of the weights' names and sizes."""
    described = [file.read_bytes() for name in ("config.json", _INDEX) if (file := path / name).is_file()]
    if not (path / _INDEX).is_file():
        weights = next(filter(None, (_files(path, patterns) for patterns in _WEIGHTS)), [])
        described += names_and_sizes(weights)
    return digest(described)


def _tokenizer_digest(path: Path) -> str:
    """A digest of the vocabulary. Other files, such as chat templates, matter to the head only."""
    return digest(file.read_bytes() for file in _files(path, _VOCABULARY))


def _files(path: Path, patterns: Iterable[str]) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
