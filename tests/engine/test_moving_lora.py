"""An answer of an adapter goes on with the same adapter at another replica."""

from collections import Counter
from pathlib import Path

import pytest

from .conftest import TWO_REPLICAS
from .lora import make_lora
from .moves import EXACT, Row, kill_one, whole_answers
from .server import START_S, Server, until
from .servers import Servers

ADAPTERS = ("storyteller", "poet")
# Not without an adapter beside them: in such a batch vLLM's CPU kernels do not repeat its answer, moved or not.
ROWS = tuple(Row(name, "resume", {"model": name}) for name in ADAPTERS)


@pytest.fixture
def adapted(servers: Servers, tiny_model: Path, tmp_path: Path) -> Server:
    """A fleet of two with two adapters."""
    paths = [f"{name}={make_lora(tmp_path / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    lora = ("--enable-lora", "--max-loras", "2", "--lora-modules", *paths)
    server = servers.get("moving-lora", tiny_model, *TWO_REPLICAS, *EXACT, *lora, engines=2)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    return server


@pytest.mark.long
def test_a_moved_answer_keeps_its_adapter(adapted: Server) -> None:
    whole = whole_answers(adapted, ROWS)
    assert len({answer["body"]["choices"][0]["text"] for answer in whole.values()}) == len(ROWS)
    assert kill_one(adapted, ROWS, whole) == Counter(resume=len(ROWS))
