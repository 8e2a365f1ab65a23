"""Requests that no other test has made."""

import itertools
from typing import Any

from tests.sim.protocol.requests import request

_ids = itertools.count()


def new_request(tokens: int = 4) -> Any:
    """For an answer of so many tokens."""
    return request(f"request-{next(_ids)}", 8, max_tokens=tokens)
