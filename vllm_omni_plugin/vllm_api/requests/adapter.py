"""A LoRA adapter as heads tell each other of it. Importing this module imports nothing of vLLM."""

from typing import Annotated, Any

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

from vllm_omni_plugin.vllm_api.requests.digests import adapter_digest

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
