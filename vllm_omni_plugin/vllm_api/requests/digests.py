"""Digests of files, by which two nodes see whether they have the same. Importing this imports nothing of vLLM."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_DIGEST_BYTES = 8
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them; it reads the first that there is."""
_ADAPTER_SAMPLES, _ADAPTER_SAMPLE_BYTES = 1024, 64 * 1024
"""All of a file up to 64 MiB, which takes some tenth of a second, and never more of one, for others wait meanwhile."""


def adapter_digest(path: str) -> str:
    """Of the configuration and the weights of a LoRA adapter, whatever its folder is called.

    Returns:
        "" if vLLM on this node would find none at that path, or none that may be read.
    """
    folder = Path(os.path.expanduser(path))
    try:
        config = [file for file in (folder / _ADAPTER_CONFIG,) if file.is_file()]
        weights = [file for name in _ADAPTER_WEIGHTS if (file := folder / name).is_file()][:1]
        found = config + weights
        return digest(samples(found, _ADAPTER_SAMPLES, _ADAPTER_SAMPLE_BYTES)) if found else ""
    except OSError:
        return ""


def samples(found: Iterable[Path], count: int, sample_bytes: int) -> Iterator[bytes]:
    """Names and sizes of files, and what is in `count` places of each, beginning and end among them.

    Two fine-tunes of one model have equal names, sizes and headers, and one may differ from the other in few tensors.
    """
    for file in found:
        yield file.name.encode()
        size = file.stat().st_size
        yield str(size).encode()
        last = max(0, size - sample_bytes)
        with file.open("rb", buffering=0) as stream:
            for place in sorted({last * sample // (count - 1) for sample in range(count)}):
                stream.seek(place)
                yield stream.read(sample_bytes)


def digest(parts: Iterable[bytes]) -> str:
    """One short text for a sequence of parts."""
    result = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # With its length, so that no two sequences of parts look alike.
        result.update(len(part).to_bytes(8, "little") + part)
    return result.hexdigest()
