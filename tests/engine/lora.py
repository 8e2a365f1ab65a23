"""Tiny LoRA adapters for the tiny model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
LAYERS = 2
HIDDEN = 128
OUTPUT_SIZES = {"q_proj": 128, "v_proj": 64}


def make_lora(directory: Path, seed: int, rank: int = RANK) -> Path:
    """An adapter with random weights, strong enough to change greedy answers.

    Returns:
        `directory`, which must not exist.
    """
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, output_size in OUTPUT_SIZES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(output_size, rank, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(OUTPUT_SIZES), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
