"""`POST /omni/explain` over a fleet whose replicas the test plays."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.admin.asgi import app_of, client_of
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError, explain
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms
from vllm_omni_plugin.balancing import Candidate, Decision, Prompt, ReplicaView, Task
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize


class Scripted:
    """A policy that answers what it is told to, and notes what it was asked.

    Attributes:
        decision: its answer.
        asked: the tasks it was asked about.
    """

    def __init__(self) -> None:
        self.decision: Any = Decision(1, "match", (Candidate(0, 2.5), Candidate(1, 0.5, 16)), matched_tokens=16)
        self.asked: list[Task] = []

    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        return self.decide(task, replicas).position

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        self.asked.append(task)
        decision: Decision = self.decision
        return decision


class SelectsOnly:
    def select(self, task: Task, replicas: Sequence[ReplicaView]) -> int:
        return 0


async def read_prompt(text: str, model: str | None) -> Prompt:
    if model not in (None, "adapter"):
        raise UnknownModelError(f"The model `{model}` does not exist.")
    if not 0 < len(text) <= 100:
        raise BadPromptError("The prompt is too long or empty.")
    return Prompt(list(text.encode()), lora_name=model or "")


def explaining(fleet: FakeFleet) -> FastAPI:
    app = app_of(fleet)
    app.state.omni_explain = partial(explain, fleet.orchestrator, read_prompt, 0)
    return app


@pytest.fixture
def policy() -> Scripted:
    return Scripted()


@pytest.fixture
async def fleet(policy: Scripted) -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=2, balancer=policy) as fleet:
        yield fleet


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(explaining(fleet)) as client:
        yield client


async def test_the_answer_says_where_and_why_with_every_candidate_and_its_load(
    fleet: FakeFleet, client: httpx.AsyncClient
) -> None:
    await fleet.submit("a", prompt=[1] * 40)
    answer = await client.post("/omni/explain", json={"prompt": "Hello"})
    assert answer.status_code == 200
    explained = answer.json()
    first, second = explained.pop("candidates")
    assert explained == {
        "policy": "Scripted",
        "reason": "match",
        "fallback": "",
        "chosen": "0.1",
        "prompt_tokens": 5,
        "queue": {"waits": False, "class": "", "ahead": 0, "wait_s": 0.0},
    }
    idle = fleet.pool.member(0).load._asdict() | {"adapters": {"slots": 0, "in_use": {}, "idle": []}}
    assert first == {"replica": "0.0", "score": 2.5, "matched_tokens": 0, **idle}
    assert (second["replica"], second["score"], second["matched_tokens"]) == ("0.1", 0.5, 16)
    assert (second["requests"], second["prefill_tokens"]) == (1, 24)


async def test_the_policy_sees_the_prompt_the_adapter_and_the_session(
    policy: Scripted, client: httpx.AsyncClient
) -> None:
    await client.post("/omni/explain", json={"prompt": "Hi", "session": "s", "model": "adapter"})
    (task,) = policy.asked
    assert (task["session"], task["prompt"].lora_name) == ("s", "adapter")
    assert list(task["prompt"].token_ids) == [72, 105]


async def test_a_score_that_json_cannot_hold_is_null(policy: Scripted, client: httpx.AsyncClient) -> None:
    policy.decision = Decision(0, "match", (Candidate(0, math.inf), Candidate(1, math.nan)), fallback="no-session")
    explained = (await client.post("/omni/explain", json={"prompt": "Hello"})).json()
    assert [candidate["score"] for candidate in explained["candidates"]] == [None, None]
    assert explained["fallback"] == "no-session"


@pytest.mark.parametrize(
    ("question", "status", "fault"),
    [
        ({}, 400, "The body: prompt: Field required."),
        ({"session": "s"}, 400, "prompt: Field required"),
        ({"prompt": 7}, 400, "prompt: str: Input should be a valid string"),
        ({"prompt": "x", "sesion": "s"}, 400, "sesion: Extra inputs are not permitted"),
        ([], 400, "The body: Input should be an object"),
        ({"prompt": ""}, 400, "too long or empty"),
        ({"prompt": "x" * 101}, 400, "too long or empty"),
        ({"prompt": "x", "model": "other"}, 404, "The model `other` does not exist."),
    ],
)
async def test_an_invalid_question_is_refused(
    policy: Scripted, client: httpx.AsyncClient, question: Any, status: int, fault: str
) -> None:
    answer = await client.post("/omni/explain", json=question)
    assert answer.status_code == status
    assert fault in answer.json()["detail"]
    assert policy.asked == []


@pytest.mark.parametrize("body", [b"", b"{", b"\xff"])
async def test_a_body_that_is_no_json_is_a_client_error(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/omni/explain", content=body)
    assert answer.status_code == 400
    assert "Invalid JSON" in answer.json()["detail"]


async def test_without_a_replica_there_is_nothing_to_explain(fleet: FakeFleet, client: httpx.AsyncClient) -> None:
    fleet.lose(0)
    fleet.lose(1)
    answer = await client.post("/omni/explain", json={"prompt": "Hello"})
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")
    assert answer.json()["detail"].startswith("No replica of stage 0 can serve right now")


async def test_a_policy_without_reasons_is_named() -> None:
    async with FakeFleet(balancer=SelectsOnly()) as fleet, client_of(explaining(fleet)) as client:
        answer = await client.post("/omni/explain", json={"prompt": "Hello"})
    assert answer.status_code == 409
    assert "SelectsOnly" in answer.json()["detail"]


@pytest.mark.parametrize(
    "decision",
    [
        Decision(7, "nowhere"),
        Decision(0, "match", (Candidate(7, 1.0),)),
        Decision(0, "match", (Candidate(0, "low"),)),  # type: ignore[arg-type]
        Decision(0, "match", (3,)),  # type: ignore[arg-type]
        Decision(0, "match", None),  # type: ignore[arg-type]
        "0",
    ],
    ids=repr,
)
async def test_an_invalid_decision_is_not_returned(policy: Scripted, client: httpx.AsyncClient, decision: Any) -> None:
    policy.decision = decision
    answer = await client.post("/omni/explain", json={"prompt": "Hello"})
    assert answer.status_code == 409
    assert "Scripted" in answer.json()["detail"]


async def test_a_question_is_answered_when_the_server_ends() -> None:
    fleet = FakeFleet(balancer=Scripted())
    async with client_of(explaining(fleet)) as client:
        question = asyncio.ensure_future(client.post("/omni/explain", json={"prompt": "Hello"}))
        await eventually(lambda: len(fleet.orchestrator.rpc_async_queue), "the question")
        fleet.orchestrator.close_queues()
        assert (await question).status_code == 503


async def test_the_answer_has_the_place_in_the_queue() -> None:
    plan = AdmissionConfig(classes=(RequestClass(name="first", priority_at_most=0), RequestClass(name="last")))
    balancer = Scripted()
    balancer.decision = Decision(0, "match")
    fleet = FakeFleet(1, balancer, traits=PoolTraits(waits_for_room=True), plan=plan)
    async with fleet, client_of(explaining(fleet)) as client:
        for name in "abcd":
            await fleet.submit(name, prompt=[1])
        first, last = [
            (await client.post("/omni/explain", json={"prompt": "Hi", "tenant": "t", "priority": priority})).json()[
                "queue"
            ]
            for priority in (0, 1)
        ]
        assert (first["waits"], first["class"], last["class"]) == (True, "first", "last")
        assert first["ahead"] <= last["ahead"] == 2
        assert len(fleet.orchestrator.request_states) == 4


async def test_the_answer_respects_the_headroom_for_other_tenants() -> None:
    balancer = Scripted()
    balancer.decision = Decision(0, "match")
    fleet = FakeFleet(
        1, balancer, traits=PoolTraits(waits_for_room=True), size=EngineSize(step_tokens=1000, sequences=9)
    )
    async with fleet, client_of(explaining(fleet)) as client:
        await fleet.submit("calm", prompt=[1], terms=RequestTerms("calm"))
        for number in range(6):
            await fleet.submit(f"{number}", prompt=[1], terms=RequestTerms("flood"))
        for running, attempt in enumerate(fleet.links[0].added, start=1):
            fleet.links[0].output(attempt, running=running)
        waits = []
        for tenant in ("flood", "calm"):
            answer = await client.post("/omni/explain", json={"prompt": "Hi", "tenant": tenant})
            waits.append(answer.json()["queue"]["waits"])
    assert waits == [True, False]
