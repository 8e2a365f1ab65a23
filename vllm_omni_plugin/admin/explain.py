"""Where a request would go and why, without running it."""

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.admin.replies import result_of
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import Candidate, Prompt, Task
from vllm_omni_plugin.errors import NoExplanationError, OmniError
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Explain, Explanation

PromptReader = Callable[[str, str | None], Awaitable[Prompt]]
"""Tokenises a text for a model's name, None for the base model. Raises `BadPromptError` and `UnknownModelError`."""


class BadPromptError(OmniError, ValueError):
    """The server could complete no such prompt. The message says why."""


class UnknownModelError(OmniError, LookupError):
    """The server has no model or adapter of this name."""


@dataclass(frozen=True, slots=True)
class DecisionReport:
    """The answer of `POST /omni/explain`.

    Attributes:
        policy: what decides, by its name.
        reason: what decided.
        fallback: why it decided by something less than its rule; "" if it did not.
        chosen: `<stage>.<replica>` of the one that would get the request.
        candidates: for each replica that was compared its id as `replica`, its `score`, of which the lowest wins (None
            for one that is not finite), `matched_tokens` of the prompt that it is expected to have cached, and all
            fields of its `ReplicaLoad`.
        prompt_tokens: length of the prompt.
        queue: `waits`: whether it would wait at the head, because the chosen replica cannot begin it yet; the `class`
            it would have; `ahead`: how many requests would go before it if it waited, about; `wait_s`: for how long.
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
    prompt: str,
    session: str | None,
    model: str | None,
    tenant: str = "",
    priority: int | None = None,
) -> DecisionReport:
    """What the policy of the stage that answers prompts would decide on a completion of this prompt, in this session,
    and where it would stand in the queue as this tenant's, with this priority.

    Nothing is run, counted or remembered. The policy is asked on the orchestrator's own loop.

    Raises:
        BadPromptError: the server could not complete it.
        UnknownModelError: it has no such model.
        NoReplicaError: no replica serves.
        NoExplanationError: the policy cannot explain itself.
        QueueClosedError: the server is about to end.
    """
    read = await read_prompt(prompt, model)
    task: Task = {"request_id": "explain", "prompt": read, "session": session, "max_tokens": None}
    reply: Future[Explanation] = Future()
    orchestrator.rpc_async_queue.force_put(Explain(stage_id, task, reply, RequestTerms(tenant), priority))
    return _report(await result_of(reply), len(read.token_ids))


def _report(explanation: Explanation, prompt_tokens: int) -> DecisionReport:
    decision, queue_position = explanation.decision, explanation.queue_position
    try:
        candidates = [_candidate(explanation, candidate) for candidate in decision.candidates]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # A third party's; the pool checks what it acts upon, not these.
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
    }
