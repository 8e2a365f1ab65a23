"""Real configurations of vLLM, for models that are never loaded."""

import json
import warnings
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def write_model(folder: Path, **other: Any) -> Path:
    """A model's folder with a configuration, a vocabulary and meaningless weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | other))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def vllm_config(model: Path | str, **arguments: Any) -> Any:
    """vLLM's configuration for these arguments, by default without a tokenizer."""
    with warnings.catch_warnings():
        # Some of vLLM's imports warn.
        warnings.simplefilter("ignore")
        return EngineArgs(model=str(model), **{"skip_tokenizer_init": True, **arguments}).create_engine_config()
