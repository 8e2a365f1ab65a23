"""A mixture of experts without weights, for an executor that needs none."""

import json
import shutil
from pathlib import Path

RANKS = 2

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def make_experts(model: Path, folder: Path) -> Path:
    """A model's folder as that of a mixture of experts, of the same vocabulary and without weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | MIXTRAL))
    return folder
