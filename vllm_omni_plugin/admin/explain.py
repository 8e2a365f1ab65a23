"""`POST /omni/explain`: where a request would go and why, without running it."""

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import Candidate, Prompt, Task
from vllm_omni_plugin.errors import NoExplanationError, OmniError
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Explain, Explanation
from vllm_omni_plugin.orchestrator.requests.thread_queue import result_of

PromptReader = Callable[[str | list[int], str | None], Awaitable[Prompt]]
"""Tokenizes a text for a model, or takes token ids; None is the base model. Raises `BadPromptError` and
`UnknownModelError`."""


class BadPromptError(OmniError, ValueError):
    """The prompt is not valid. The message says why."""


class UnknownModelError(OmniError, LookupError):
    """The server has no model or adapter of this name."""


@dataclass(frozen=True, slots=True)
class DecisionReport:
    """The answer of `POST /omni/explain`.

    Attributes:
        chosen: `<stage>.<replica>` of the replica that would get the request.
        candidates: for each compared replica its id as `replica`, its `score` (the lowest wins; None if not finite),
            the `matched_tokens` that are expected to be cached, and all fields of its `ReplicaLoad`.
        queue: `waits`: whether the request would wait at the head, because the chosen replica cannot begin it yet;
            `class`: its class, empty without admission control; `ahead`: approximate number of requests before it;
            `wait_s`: the expected wait.
    """

    policy: str
    reason: str
    fallback: str
    chosen: str
    candidates: list[dict[str, Any]]
    prompt_tokens: int
    queue: dict[str, Any]


async def explain(
    orchestrator: Orchestrator,
    read_prompt: PromptReader,
    stage_id: int,
    prompt: str | list[int],
    *,
    session: str | None,
    model: str | None,
    tenant: str = "",
    priority: int | None = None,
) -> DecisionReport:
    """Ask the policy, on the orchestrator's loop, where a completion of `prompt` would go."""
    read = await read_prompt(prompt, model)
    task: Task = {"request_id": "explain", "prompt": read, "session": session, "max_tokens": None}
    reply: Future[Explanation] = Future()
    orchestrator.rpc_async_queue.put(Explain(stage_id, task, reply, RequestTerms(tenant), priority))
    return _report(await result_of(reply), len(read.token_ids))


def _report(explanation: Explanation, prompt_tokens: int) -> DecisionReport:
    decision, queue_position = explanation.decision, explanation.queue_position
    try:
        candidates = [_candidate(explanation, candidate) for candidate in decision.candidates]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Of a third party's policy: the pool checks only the fields that it uses itself.
        fault = f"names candidates that cannot be shown ({error!r})"
        raise NoExplanationError(f"Policy {explanation.policy} {fault}.") from error
    return DecisionReport(
        policy=explanation.policy,
        reason=decision.reason,
        fallback=decision.fallback,
        chosen=explanation.replicas[decision.position][0],
        candidates=candidates,
        prompt_tokens=prompt_tokens,
        queue={
            "waits": not explanation.may_begin,
            "class": queue_position.class_name,
            "ahead": round(queue_position.ahead),
            "wait_s": round(queue_position.wait_s, 3),
        },
    )


def _candidate(explanation: Explanation, candidate: Candidate) -> dict[str, Any]:
    replica, load = explanation.replicas[candidate.position]
    score = float(candidate.score)
    return {
        "replica": replica,
        # JSON has no infinity.
        "score": score if math.isfinite(score) else None,
        "matched_tokens": int(candidate.matched_tokens),
        **load._asdict(),
        "adapters": load.adapters._asdict(),
    }
