"""A LoRA adapter as heads tell each other of it. Importing this module imports nothing of vLLM."""

from typing import Annotated, Any

from msgspec import Meta, Struct, convert

AdapterId = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Adapter(Struct, frozen=True, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """The same fields in the same order as vLLM's `LoRARequest`, so that engines take the one for the other.

    Attributes:
        lora_name: the name by which requests ask for it.
        lora_int_id: its id in engines; no two adapters of a fleet may share one.
        lora_path: where engines load it from.
        base_model_name: the name of the model it was made for, as `/v1/models` shows it.
        load_inplace: whether an engine that has an adapter of this id loads it again.
        is_3d_lora_weight: the layout of its weights in a mixture of experts.
    """

    lora_name: _Text
    lora_int_id: AdapterId
    lora_path: _Text
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def adapter_of(lora_request: Any) -> Adapter:
    """The same of a `LoRARequest`.

    Raises:
        ValidationError: it has no name or path, or they are too long.
    """
    return convert(lora_request, Adapter, from_attributes=True)
