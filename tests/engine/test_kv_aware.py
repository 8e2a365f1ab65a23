"""`--omni-lb-policy kv-aware` knows what real engines have cached: what it predicts is what they report."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from .both_replicas import assignments
from .conftest import ADAPTER, AS_ADMIN, BLOCK
from .lora import make_lora
from .nodes import NodeFleet
from .server import MODEL, START_S, Server, until

STORY = (
    "When a replica goes quiet, the others carry on with its unfinished answers and nobody waits twice. "
    "Nothing was lost, nothing came twice, and every stream ended exactly once with a reason for finishing. "
)
_numbers = itertools.count()

pytestmark = pytest.mark.both_front_ends


class Hit(NamedTuple):
    """Prompt tokens taken from a cache: as the policy predicted, and as the engine said."""

    predicted: int
    reported: int


class Fleet:
    """Asks a head, one request after the other, and compares what it predicts with what happens.

    Attributes:
        hits: of every request that counts, in order.
    """

    def __init__(self, head: Server) -> None:
        self.head = head
        self.hits: list[Hit] = []
        self._http = head.http(60.0)

    def close(self) -> None:
        self._http.close()

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """One request that counts; returns once all that the engine reported because of it is known."""
        before = self._counter("matched")
        replica, answer = self._post(path, {"model": MODEL, "max_tokens": 4, "ignore_eos": True, **body})
        predicted = self._counter("matched") - before
        details = answer["usage"]["prompt_tokens_details"] or {}
        self.hits.append(Hit(predicted, details.get("cached_tokens") or 0))
        self.settle(replica)
        return answer

    def replica_of(self, **body: Any) -> str:
        """The replica that gets this completion."""
        return self._post("/v1/completions", {"max_tokens": 1, **body})[0]

    def call(self, path: str, **body: Any) -> None:
        assert self._http.post(path, json=body, headers=AS_ADMIN).status_code == 200

    def settle(self, replica: str) -> None:
        """Return once everything is known that this replica has reported until now: its reports come in order."""
        marker, asked = "", ""
        while asked != replica:
            marker = f"{next(_numbers)} is a number that nobody has asked about. " + STORY
            asked, _ = self._post("/v1/completions", {"model": MODEL, "prompt": marker, "max_tokens": 1})
        until(lambda: self.matched(marker)[replica], "the marker is reported")

    def matched(self, prompt: str) -> dict[str, int]:
        """Tokens of a prompt that each replica is known to have cached."""
        found = self.explain(prompt)["candidates"]
        return {candidate["replica"]: candidate["matched_tokens"] for candidate in found}

    def explain(self, prompt: str) -> dict[str, Any]:
        explained: dict[str, Any] = self._http.post("/omni/explain", json={"prompt": prompt}, headers=AS_ADMIN).json()
        return explained

    def fallbacks(self) -> dict[str, int]:
        """How often the policy decided by less than its rule, by why."""
        samples = self.head.metrics("vllm_omni_fleet:decision_fallbacks_total")
        return {dict(labels)["fallback"]: int(value) for labels, value in samples.items() if value}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self._http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]
        return found

    def _counter(self, name: str) -> int:
        return int(self.head.total(f"vllm_omni_fleet:{name}_tokens_total"))

    def _post(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        before = assignments(self.head)
        response = self._http.post(path, json={"temperature": 0, **body})
        assert response.status_code == 200, response.text
        (replica,) = (replica for replica, count in assignments(self.head).items() if count > before[replica])
        return f"0.{replica}", response.json()


@pytest.fixture
def aware(nodes_of_both_kinds: NodeFleet) -> Iterator[Fleet]:
    aware = Fleet(nodes_of_both_kinds.head)
    until(lambda: not aware.explain(STORY)["fallback"], "both replicas have reported")
    yield aware
    aware.close()


def assert_predicted(aware: Fleet, *, at_least: int) -> None:
    """Every prediction was right, and so many tokens were hit at all."""
    assert [hit.predicted for hit in aware.hits] == [hit.reported for hit in aware.hits]
    assert sum(hit.reported for hit in aware.hits) >= at_least


def mixed_work(aware: Fleet) -> None:
    """Requests of every kind, most of which begin as others did, and more than fit into the caches."""
    for turn in range(4):
        topic = f"Topic {turn}. " + STORY * 4
        for _ in range(2):
            aware.ask(prompt=topic)
            aware.ask("/v1/chat/completions", messages=[{"role": "user", "content": topic}])
            aware.ask(prompt=aware.tokens(topic))
            aware.ask(prompt=topic, cache_salt=f"salt {turn % 2}")
            aware.ask(prompt=topic, model=ADAPTER)
        aware.ask(prompt="Topic 0. " + STORY * 6)
    conversation = aware.tokens(STORY)
    for _ in range(5):
        answer = aware.ask(prompt=conversation, max_tokens=40, return_token_ids=True)
        conversation += answer["choices"][0]["token_ids"] + aware.tokens("And then? ")


def test_predicted_hits_are_those_that_engines_report(aware: Fleet) -> None:
    before = aware.fallbacks()
    mixed_work(aware)
    assert_predicted(aware, at_least=1000)
    assert aware.fallbacks() == before


def test_after_caches_are_reset_nothing_is_predicted(aware: Fleet) -> None:
    aware.ask(prompt=STORY * 8)
    assert max(aware.matched(STORY * 8).values()) > 0
    assert httpx.post(f"{aware.head.url}/reset_prefix_cache").status_code == 200
    assert max(aware.matched(STORY * 8).values()) == 0
    assert aware.explain(STORY * 8)["fallback"] == ""
    aware.ask(prompt=STORY * 8)
    aware.ask(prompt=STORY * 8)
    assert_predicted(aware, at_least=5 * BLOCK)
    assert aware.hits[-2].reported == 0


def test_of_two_adapters_each_finds_its_own_replica_if_an_engine_has_one_slot(aware: Fleet, tmp_path: Path) -> None:
    names = ("left", "right")
    for seed, name in enumerate(names):
        aware.call("/v1/load_lora_adapter", lora_name=name, lora_path=str(make_lora(tmp_path / name, seed)))
    try:
        # Equal replicas are drawn by lot, until the adapters are apart for the first time.
        homes = [tuple(aware.replica_of(prompt="Once", model=name) for name in names) for _ in range(16)]
    finally:
        for name in names:
            aware.call("/v1/unload_lora_adapter", lora_name=name)
    assert set(homes[-4:]) in ({("0.0", "0.1")}, {("0.1", "0.0")})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["local", "headless"])
def test_after_a_replica_was_restarted_predictions_are_right(
    aware: Fleet, nodes_of_both_kinds: NodeFleet, kind: str
) -> None:
    prompts = [f"{number}. " + STORY * 3 for number in range(6)]
    for prompt in prompts:
        aware.ask(prompt=prompt)
    nodes = nodes_of_both_kinds
    engine, replica = (nodes.head.engine_pids()[0], "0.0") if kind == "local" else (nodes.nodes[0].engine.pid, "0.1")
    assert any(aware.matched(prompt)[replica] for prompt in prompts)
    os.kill(engine, signal.SIGKILL)
    until(lambda: aware.head.replicas_up() == 1, "the loss is noticed")
    nodes.wait_for_replicas(2)
    until(lambda: not aware.explain(STORY)["fallback"], "the new engine has reported", START_S)
    assert not any(aware.matched(prompt)[replica] for prompt in prompts)
    for prompt in prompts + prompts:
        aware.ask(prompt=prompt)
    assert_predicted(aware, at_least=6 * 2 * BLOCK)
