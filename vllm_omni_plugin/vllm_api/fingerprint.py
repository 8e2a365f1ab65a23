"""What of a configuration must be the same on a head and a replica for their answers to be the same."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import vllm

_HUB_CACHE_PREFIX = "models--"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_VOCABULARY = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "tekken.json", "*.tiktoken")
_DIGEST_BYTES = 8
_SAMPLE_BYTES = 64 * 1024


def fingerprint(vllm_config: Any, stage_id: int) -> dict[str, str]:
    """The fields to compare with `replicas.agreement.differences`, as text for an operator to read.

    Models and tokenizers on the hub go by their names, local ones by their content: paths differ from node to node.
    """
    model = vllm_config.model_config
    return {
        "stage": str(stage_id),
        # Without the part that names the build: a head on a CPU may serve engines on GPUs.
        "vLLM version": vllm.__version__.partition("+")[0],
        "model": _identity(model.model, _model_digest),
        "revision": str(model.revision),
        "tokenizer": _identity(model.tokenizer, _tokenizer_digest),
        "tokenizer mode": str(model.tokenizer_mode),
        "runner": f"{model.runner_type}, convert {model.convert_type}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "max model length": str(model.max_model_len),
        "logprobs mode": str(model.logprobs_mode),
        "LoRA": _lora(vllm_config.lora_config),
    }


def _lora(config: Any) -> str:
    if config is None:
        return "off"
    return f"at most {config.max_loras} adapters of rank {config.max_lora_rank}"


def _identity(name: str, digest: Callable[[Path], str]) -> str:
    path = Path(name)
    if not path.exists():
        return name
    # Offline, vLLM puts the folder of its download cache in place of the name.
    hub_name = next((part for part in path.parts if part.startswith(_HUB_CACHE_PREFIX)), None)
    if hub_name is not None:
        return hub_name.removeprefix(_HUB_CACHE_PREFIX).replace("--", "/")
    return f"local files {digest(path)}"


def _model_digest(path: Path) -> str:
    """Of the configuration's content, and of names, sizes and samples of the weights; to read all takes minutes."""
    config = path / "config.json"
    content = config.read_bytes() if config.is_file() else b""
    weights = (part for file in _files(path, _WEIGHTS) for part in (file.name.encode(), *_samples(file)))
    return _digest([content, *weights])


def _samples(file: Path) -> Iterator[bytes]:
    """The size and three places of a file. Two fine-tunes of one model have equal names, sizes and headers."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as stream:
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            stream.seek(start)
            yield stream.read(_SAMPLE_BYTES)


def _tokenizer_digest(path: Path) -> str:
    """Of the vocabulary only: what else lies beside it, such as chat templates, matters to the head alone."""
    return _digest(file.read_bytes() for file in _files(path, _VOCABULARY))


def _files(path: Path, patterns: Iterable[str]) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # With its length, so that no two sequences of parts look alike.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
