"""Transforms that do what the request asks of them."""

from collections.abc import Mapping
from typing import Any

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline.transfer import StageOutput, Transfer


def obedient(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
    """All tokens that there are, unless the request's parameter of the stage's name says otherwise.

    A callable there is called with the transfer; a value is returned.
    """
    wish = transfer.params.get(transfer.stage)
    if callable(wish):
        wish = wish(transfer)
    if wish is not None:
        return None if wish == "nothing" else wish
    return [token for output in outputs.values() for token in output.token_ids] or None


def raising(transfer: Transfer) -> None:
    """A wish that fails."""
    raise RuntimeError("no idea")


def leaving(transfer: Transfer) -> None:
    """A wish that would end a process."""
    raise SystemExit(3)


def refusing(transfer: Transfer) -> None:
    """A wish that blames the client."""
    raise StageInputError("no such voice")
