"""Where a request would go and why, without running it."""

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.admin.replies import result_of
from vllm_omni_plugin.balancing import Candidate, Prompt, Task
from vllm_omni_plugin.errors import OmniError, UnexplainedError
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
    """

    policy: str
    reason: str
    fallback: str
    chosen: str
    candidates: list[dict[str, Any]]
    prompt_tokens: int


class Explainer:
    """Asks the policy what it would do now.

    Args:
        stage_id: the stage that answers prompts.
    """

    def __init__(self, orchestrator: Orchestrator, read_prompt: PromptReader, stage_id: int = 0) -> None:
        self._orchestrator = orchestrator
        self._stage_id = stage_id
        self._read_prompt = read_prompt

    async def explain(self, text: str, session: str | None, model: str | None) -> DecisionReport:
        """Decide on a completion of this text, in this session if any. Nothing is run, counted or remembered.

        Raises:
            BadPromptError: the server could not complete it.
            UnknownModelError: it has no such model.
            NoReplicaError: no replica serves.
            UnexplainedError: the policy cannot explain itself.
            QueueClosedError: the server is about to end.
        """
        prompt = await self._read_prompt(text, model)
        task: Task = {"request_id": "explain", "prompt": prompt, "session": session, "max_tokens": None}
        reply: Future[Explanation] = Future()
        self._orchestrator.rpc_async_queue.force_put(Explain(self._stage_id, task, reply))
        return _report(await result_of(reply), len(prompt.token_ids))


def _report(explanation: Explanation, prompt_tokens: int) -> DecisionReport:
    decision = explanation.decision
    try:
        candidates = [_candidate(explanation, candidate) for candidate in decision.candidates]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # A third party's; the pool checks what it acts upon, not these.
        fault = f"names candidates that cannot be shown ({error!r})"
        raise UnexplainedError(f"Policy {explanation.policy} {fault}.") from error
    return DecisionReport(
        policy=explanation.policy,
        reason=decision.reason,
        fallback=decision.fallback,
        chosen=explanation.replicas[decision.position][0],
        candidates=candidates,
        prompt_tokens=prompt_tokens,
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
