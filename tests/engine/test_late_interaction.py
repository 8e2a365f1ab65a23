"""Late-interaction scoring behind the fleet: an engine dies of a document whose query another one has seen."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .conftest import TWO_REPLICAS
from .server import MODEL, START_S, Server, until
from .servers import Servers
from .suspended import PATIENT, engines_of

FEW = [f"document {number} says " + "a head takes every request " * number for number in range(7)]
MANY = FEW * 60
"""Documents that are not all scored when an engine dies that is seen to have some of them."""
QUERIES = [f"query {number} of how many engines are running" for number in range(16)]
"""So many that no replica is left without one, although their names are drawn by lot."""
IN_FLIGHT = "vllm_omni_fleet:requests_in_flight"


@pytest.fixture(scope="module")
def colbert(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of vectors for each token, with the tokenizer of the tiny one and weights that vLLM makes up."""
    folder = tmp_path_factory.mktemp("colbert") / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    config = {"architectures": ["HF_ColBERT"], "model_type": "bert", "vocab_size": vocabulary, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024, "pad_token_id": 0}))
    return folder


@pytest.fixture
def scoring(servers: Servers, colbert: Path) -> Iterator[Server]:
    """A fleet of two that both serve."""
    flags = ("--runner", "pooling", "--load-format", "dummy", *PATIENT)
    server = servers.get("late-interaction", colbert, *TWO_REPLICAS, *flags, engines=2)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    yield server
    until(lambda: server.replicas_up() == 2, "both replicas serve again", START_S)


def rerank(server: Server, documents: list[str], query: str) -> tuple[int, Any]:
    """Status, and the score of each document in their order, or the error."""
    with server.http(240.0) as http:
        response = http.post("/rerank", json={"model": MODEL, "query": query, "documents": documents})
    if response.is_error:
        return response.status_code, response.json()["error"]["message"]
    results = sorted(response.json()["results"], key=lambda result: result["index"])
    return response.status_code, [result["relevance_score"] for result in results]


@pytest.mark.long
def test_documents_are_scored_where_their_query_is(scoring: Server) -> None:
    before = scoring.by_replica("vllm_omni_fleet:assignments_total")
    engines = scoring.engine_pids()
    with ThreadPoolExecutor(len(QUERIES)) as threads:
        answers = list(threads.map(partial(rerank, scoring, FEW), QUERIES * 2))
    for number, (status, scores) in enumerate(answers):
        assert status == 200
        # Two of them may come to the same, but not all.
        assert (len(scores), len(set(scores)) > 1) == (len(FEW), True)
        assert scores == pytest.approx(answers[number % len(QUERIES)][1], rel=1e-5)
    sent = {
        name: count - before[name] for name, count in scoring.by_replica("vllm_omni_fleet:assignments_total").items()
    }
    assert sum(sent.values()) == len(answers) * (1 + len(FEW))
    # A query and its documents are not divided.
    assert all(count % (1 + len(FEW)) == 0 and count > 0 for count in sent.values()), sent
    assert scoring.engine_pids() == engines


@pytest.mark.long
def test_a_killed_engine_takes_no_other_with_it(scoring: Server) -> None:
    engines = engines_of(scoring)
    with ThreadPoolExecutor(len(QUERIES)) as threads:
        answers = [threads.submit(rerank, scoring, MANY, query) for query in QUERIES]
        until(lambda: scoring.by_replica(IN_FLIGHT)["1"] > len(QUERIES), "its engine has documents")
        engines["1"].core.kill()
        ended = [answer.result() for answer in answers]
    lost = [text for status, text in ended if status == 500]
    assert lost
    assert [text for text in lost if "Please send both again" not in text] == []
    assert all(len(scores) == len(MANY) for status, scores in ended if status == 200)
    assert {status for status, _ in ended} <= {200, 500}
    assert engines["0"].core.is_running()
    with ThreadPoolExecutor(len(QUERIES)) as threads:
        again = list(threads.map(partial(rerank, scoring, FEW), QUERIES))
    assert {status for status, _ in again} == {200}
