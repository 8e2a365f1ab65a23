"""A pooling model behind the fleet."""

from functools import partial
from pathlib import Path

import pytest

from .both_replicas import answers_of_both
from .conftest import TWO_REPLICAS
from .server import MODEL, Server
from .servers import Servers

pytestmark = pytest.mark.long
TEXTS = ["A head takes every request", "Nothing was lost", "One"]


@pytest.fixture
def pooling_fleet(servers: Servers, tiny_model: Path) -> Server:
    args = (*TWO_REPLICAS, "--runner", "pooling", "--convert", "embed")
    return servers.get("pooling-fleet", tiny_model, *args, engines=2)


def embed(server: Server, text: str) -> list[float]:
    with server.client() as client:
        return client.embeddings.create(model=MODEL, input=text, encoding_format="float").data[0].embedding


@pytest.mark.parametrize("text", TEXTS)
def test_embeddings_are_the_same_from_every_replica(pooling_fleet: Server, text: str) -> None:
    first, *others = answers_of_both(pooling_fleet, partial(embed, pooling_fleet, text))
    assert sum(value * value for value in first) == pytest.approx(1.0, abs=1e-3)
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)


def test_texts_of_one_request_are_embedded_as_each_alone(pooling_fleet: Server) -> None:
    with pooling_fleet.client() as client:
        together = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [item.index for item in together.data] == [0, 1, 2]
    for item, text in zip(together.data, TEXTS, strict=True):
        assert item.embedding == pytest.approx(embed(pooling_fleet, text), abs=1e-4)
    assert together.data[0].embedding != pytest.approx(together.data[1].embedding, abs=1e-2)
