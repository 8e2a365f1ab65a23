"""A LoRA adapter as heads tell each other of it, and digests of files. Importing this imports nothing of vLLM."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

_DIGEST_BYTES = 8
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them; it reads the first that there is."""
_ADAPTER_SAMPLES, _ADAPTER_SAMPLE_BYTES = 1024, 64 * 1024
"""All of a file up to 64 MiB, which takes some tenth of a second, and never more of one, for others wait meanwhile."""


def adapter_digest(path: str | Path) -> str:
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


AdapterId = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_Digest = Annotated[str, Meta(max_length=64)]


class Adapter(Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """The same fields in the same order as vLLM's `LoRARequest`, so that engines take the one for the other.

    What follows them, engines ignore.

    Attributes:
        lora_name: the name by which requests ask for it.
        lora_int_id: its id in engines; no two adapters of a fleet may share one.
        lora_path: where engines load it from.
        base_model_name: the name of the model it was made for, as `/v1/models` shows it.
        load_inplace: whether an engine that has an adapter of this id loads it again.
        is_3d_lora_weight: the layout of its weights in a mixture of experts.
        digest: of its files on the node of the head that loads it; "" if that has none, as with a name on the hub.
    """

    lora_name: _Text
    lora_int_id: AdapterId
    lora_path: _Text
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    digest: _Digest = ""


def adapter_of(lora_request: Any) -> Adapter:
    """The same of a `LoRARequest`, with the digest of the files on this node, which are read.

    Raises:
        ValidationError: it has no name or path, or they are too long.
    """
    adapter = convert(lora_request, Adapter, from_attributes=True)
    return replace(adapter, digest=adapter_digest(adapter.lora_path))


def why_other_files(adapter: Adapter) -> str:
    """How the files of an adapter on this node, which are read, differ from those of the head that loads it.

    Returns:
        "" if they are the same, or the head has none to compare.
    """
    here = adapter_digest(adapter.lora_path) if adapter.digest else ""
    if here == adapter.digest:
        return ""
    return (
        f"LoRA adapter {adapter.lora_name!r}: the files at {adapter.lora_path} have the digest {here or '(no files)'} "
        f"on this node, and {adapter.digest} where it was loaded first; all nodes need the same"
    )
