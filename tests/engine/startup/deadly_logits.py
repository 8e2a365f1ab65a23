"""A logits processor of which an engine dies in the middle of an answer."""

import os
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

MARKER = [13] * 13
"""The prompt of the request that an engine dies of."""
DEADLY_TOKEN = 40
"""How many tokens of its answer there are then."""


class DeadlyLogits(LogitsProcessor):
    """Ends its process, as a fault in native code would, once the answer to `MARKER` has `DEADLY_TOKEN` tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._answers: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        """It is applied to greedy requests, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the answers to `MARKER`, by their places in the batch."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._answers.pop(place, None)
        for place, _, prompt, answer in batch_update.added:
            self._answers.pop(place, None)
            if prompt == MARKER:
                self._answers[place] = answer
        for one, other, direction in batch_update.moved:
            from_one, from_other = self._answers.pop(one, None), self._answers.pop(other, None)
            if from_one is not None:
                self._answers[other] = from_one
            if from_other is not None and direction is MoveDirectionality.SWAP:
                self._answers[one] = from_other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if any(len(answer) >= DEADLY_TOKEN for answer in self._answers.values()):
            os._exit(1)
        return logits
