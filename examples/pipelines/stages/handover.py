"""Transforms: turn the outputs of stages into the input of the next one."""

from collections.abc import Mapping

from vllm_omni_plugin.pipeline import StageInput, StageOutput, Transfer

CODES_PER_TOKEN = 4
"""Codec tokens for one token of text: 80 ms."""
STYLES = {"plain": "in plain words", "formal": "in formal words"}


def ask_to_refine(outputs: Mapping[str, StageOutput], transfer: Transfer) -> str | None:
    """The prompt of the refiner: question, draft and instruction; None without a draft.

    The client chooses one of `STYLES` with `omni.params.style`.
    """
    draft = outputs["thinker"].text
    style = transfer.params.get("style", "plain")
    if style not in STYLES:
        raise ValueError(f"there is no style {style!r}: use one of {', '.join(STYLES)}")
    return f"{transfer.prompt}\nDraft: {draft}\nThe same {STYLES[style]}: " if draft else None


def answer_and_verdict(outputs: Mapping[str, StageOutput], transfer: Transfer) -> StageInput:
    """The generator's answer, and the guard's probability that it is unsafe."""
    _, unsafe = outputs["guard"].tensor.tolist()
    return StageInput(text=outputs["generator"].text, metadata={"unsafe": unsafe})


def speak(outputs: Mapping[str, StageOutput], transfer: Transfer) -> StageInput | None:
    """The chunk's text, which the talker tokenizes itself, with a limit for the length of its speech."""
    thought = outputs["thinker"]
    if not thought.text:
        return None
    return StageInput(text=thought.text, sampling={"max_tokens": CODES_PER_TOKEN * len(thought.token_ids)})
