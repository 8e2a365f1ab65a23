"""The message that describes a LoRA adapter, and digests of files. Importing this module does not import vLLM."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

from vllm_omni_plugin.logger import printable

_DIGEST_BYTES = 8
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them; it reads the first that exists."""


def adapter_digest(path: str | Path) -> str:
    """The digest of a LoRA adapter's configuration and of its weights' name and size; "" if vLLM could not read it."""
    try:
        folder = Path(os.path.expanduser(path))
        config = folder / _ADAPTER_CONFIG
        weights = [file for name in _ADAPTER_WEIGHTS if (file := folder / name).is_file()][:1]
        found = [config.read_bytes()] if config.is_file() else []
        found += names_and_sizes(weights)
    except (OSError, ValueError):  # ValueError: a null byte
        return ""
    return digest(found) if found else ""


def names_and_sizes(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        yield file.name.encode()
        yield str(file.stat().st_size).encode()


def digest(parts: Iterable[bytes]) -> str:
    result = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        # With its length, so that different sequences of parts differ.
        result.update(len(part).to_bytes(8, "little") + part)
    return result.hexdigest()


AdapterId = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_Digest = Annotated[str, Meta(max_length=64)]


class Adapter(Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's `LoRARequest`, field by field, so that engines can decode it. They ignore the fields that follow.

    `lora_int_id` is unique in the fleet. `digest` is that of the files on the head that loads it; "" if that has no
    files, as for an adapter on the hub.
    """

    lora_name: _Text
    lora_int_id: AdapterId
    lora_path: _Text
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    digest: _Digest = ""


def adapter_of(lora_request: Any) -> Adapter:
    """Convert a `LoRARequest`; reads the adapter's files. Raises ValidationError for a wrong name or path."""
    adapter = convert(lora_request, Adapter, from_attributes=True)
    return replace(adapter, digest=adapter_digest(adapter.lora_path))


def adapter_mismatch(adapter: Adapter) -> str:
    """How an adapter's files on this node differ from those where it was loaded first; "" if not. Reads the files."""
    here = adapter_digest(adapter.lora_path) if adapter.digest else ""
    if here == adapter.digest:
        return ""
    # Other heads choose path and digest, and the text is logged.
    return printable(
        f"LoRA adapter {adapter.lora_name!r}: the files at {adapter.lora_path} have the digest {here or '(no files)'} "
        f"on this node, and {adapter.digest} where it was loaded first; all nodes need the same"
    )
