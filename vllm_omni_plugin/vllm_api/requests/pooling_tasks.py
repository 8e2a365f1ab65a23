"""What a pooling model is asked for when nobody says it. Importing this imports nothing of vLLM."""

from collections.abc import Mapping
from typing import Any

_BY_ARCHITECTURE: Mapping[str, str] = {
    "ForTokenClassification": "token_classify",
    "Classification": "classify",
    "ClassificationModel": "classify",
}
"""Ends of the names of architectures."""


def default_task(model_config: Any) -> str:
    """What `sampling: {task: ...}` is without it.

    The engine alone knows what its model can do; this follows from what the configuration says of it.
    """
    pooler = model_config.pooler_config
    if pooler is not None and pooler.task is not None:
        task: str = pooler.task
        return task
    for end, named in _BY_ARCHITECTURE.items():
        if any(architecture.endswith(end) for architecture in model_config.architectures):
            return named
    return "classify" if model_config.convert_type == "classify" else "embed"
