"""The settings of a Python stage that must be equal on a head and a replica."""

import hashlib
from importlib.metadata import version

import msgspec

from vllm_omni_plugin.pipeline.stage import Stage

_DIGEST_BYTES = 8


def python_fingerprint(stage: Stage) -> dict[str, str]:
    """The fields to compare with `replicas.server.attached_heads.differences`, as text for an operator to read."""
    options = msgspec.json.encode(stage.options, order="deterministic")
    return {
        "stage": str(stage.id),
        "stage name": stage.name,
        "stage class": stage.engine,
        "options": hashlib.blake2b(options, digest_size=_DIGEST_BYTES).hexdigest(),
        "plugin version": version("vllm-omni-plugin"),
    }
