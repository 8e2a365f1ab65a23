"""Where real requests went: header, explanation and counters agree with what the engines did.

vLLM's Rust front end has no such header, and operators' requests are not logged beside it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import ADMIN_KEY, AS_ADMIN
from .nodes import NodeFleet
from .server import ASSIGNMENTS, MODEL, Server, until

HEADER = "X-Omni-Replica"
SECRET_PROMPT = "abracadabra " * 40
MESSAGES: Any = [{"role": "user", "content": "How many engines are running?"}]
STREAMED = (
    ("/v1/completions", {"prompt": "Once upon a time"}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "How many engines are running?"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
)


def text(topic: int) -> str:
    """A prompt of several blocks that no other test asks for."""
    return f"{topic} " * 500


@pytest.fixture
def head(nodes_of_both_kinds: NodeFleet) -> Server:
    return nodes_of_both_kinds.head


@pytest.fixture
def client(head: Server) -> Iterator[openai.OpenAI]:
    with head.client() as client:
        yield client


def assigned(head: Server) -> dict[str, float]:
    """Return the requests that each replica ever got, by its name."""
    return {f"0.{replica}": count for replica, count in head.by_replica(ASSIGNMENTS).items()}


def got_more(head: Server, before: dict[str, float]) -> list[str]:
    """The names of the replicas that have got requests since."""
    return [replica for replica, count in assigned(head).items() if count > before[replica]]


def explain(head: Server, **query: str) -> Any:
    with head.http() as http:
        answer = http.post("/omni/explain", json=query, headers=AS_ADMIN)
    assert answer.status_code == 200
    return answer.json()


def foreseen(head: Server, prompt: str) -> Any:
    """The explanation for a prompt that a replica has cached, nothing before that is known."""
    known = explain(head, prompt=prompt, model=MODEL, session="s")
    return known if any(candidate["matched_tokens"] for candidate in known["candidates"]) else None


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=[path for path, _ in STREAMED])
def test_streams_of_every_kind_name_it_at_their_end_if_asked(head: Server, path: str, body: Mapping[str, Any]) -> None:
    before = assigned(head)
    with head.http(60.0) as http:
        answer = http.post(path, json={"model": MODEL, "stream": True, **body}, headers={HEADER: "1"})
    (replica,) = got_more(head, before)
    assert "error" not in answer.text
    assert answer.text.endswith(f": {HEADER}: {replica}\n\n")


def test_requests_of_one_answer_name_all_of_theirs(head: Server, client: openai.OpenAI) -> None:
    before = assigned(head)
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt=[text(1), text(2), text(3)], n=2, max_tokens=4
    )
    assert len(answer.parse().choices) == 6
    assert sum(assigned(head).values()) - sum(before.values()) == 6
    assert set(answer.headers[HEADER].split(", ")) == set(got_more(head, before))


@pytest.mark.both_front_ends
def test_an_explanation_foresees_where_a_request_goes_and_runs_nothing(head: Server, client: openai.OpenAI) -> None:
    fresh = explain(head, prompt=text(4))
    assert {candidate["matched_tokens"] for candidate in fresh["candidates"]} <= {0}
    before = assigned(head)
    usage = client.completions.create(model=MODEL, prompt=text(4), max_tokens=4).usage
    counts = assigned(head), head.total("vllm_omni_fleet:decisions_total")
    known = until(lambda: foreseen(head, text(4)), "the engine has reported what it cached")
    assert (assigned(head), head.total("vllm_omni_fleet:decisions_total")) == counts
    assert (known["policy"], [known["chosen"]]) == ("kv-aware", got_more(head, before))
    assert usage is not None
    assert known["prompt_tokens"] == usage.prompt_tokens
    matched = {candidate["replica"]: candidate["matched_tokens"] for candidate in known["candidates"]}
    assert 0 < matched[known["chosen"]] < known["prompt_tokens"]


def test_the_command_shows_what_the_route_says_and_the_log_no_prompt(head: Server, admin_keys: Path) -> None:
    command = [str(Path(sys.executable).with_name("vllm-omni-plugin")), "explain", SECRET_PROMPT, "--url", head.url]
    (keys := admin_keys.with_name("of-the-command")).write_text(ADMIN_KEY)
    command += ["--admin-key-file", str(keys)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    explained = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    log = head.log.read_text()
    assert "POST /omni/explain" in log
    assert SECRET_PROMPT.split()[0] not in log
    replicas = [candidate["replica"] for candidate in explained["candidates"]]
    assert all(replica in told for replica in replicas)
    # Nobody knows the prompt, so each time it is drawn by lot.
    assert any(f"would go to replica {replica} (kv-aware: " in told for replica in replicas)
