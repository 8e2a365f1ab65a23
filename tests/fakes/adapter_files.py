"""Writes the files of a LoRA adapter, with tiny content."""

import json
from pathlib import Path
from typing import Any


def write_adapter(
    folder: Path,
    weights: bytes = b"weights",
    config: dict[str, Any] | None = None,
    weights_name: str = "adapter_model.safetensors",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config or {"r": 8}))
    (folder / weights_name).write_bytes(weights)
    return folder
