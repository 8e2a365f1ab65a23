"""Transforms that follow parameters of the request."""

from collections.abc import Mapping
from typing import Any

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import StageOutput, Transfer


def obedient(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
    """All input tokens, unless the request has a parameter with the stage's name: a value to return, or a callable."""
    wish = transfer.params.get(transfer.stage)
    if callable(wish):
        wish = wish(transfer)
    if wish is not None:
        return None if wish == "nothing" else wish
    return [token for output in outputs.values() for token in output.token_ids] or None


def raising(transfer: Transfer) -> None:
    raise RuntimeError("no idea")


def raising_bytes(transfer: Transfer) -> None:
    raise ValueError("no file \udcff")  # as Python decodes a name that is not UTF-8


def leaving(transfer: Transfer) -> None:
    raise SystemExit(3)


def refusing(transfer: Transfer) -> None:
    raise StageInputError("no such voice")
