"""An engine that is played: requests wait for a place, and put out their tokens in three messages."""

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.fakes.engine_api import VOCABULARY, FakeEngineApi, FakeOutput, FakeOutputs, FakeRequest
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.link import Link
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport

PLACES = 8
"""Requests that an engine works on at once."""
LINK_S = 0.0005
PREFILL_TOKENS_PER_S = 10_000.0
TOKEN_S = 0.02
BLOCK_SIZE, BLOCKS = 16, 512
_SESSIONS = 40
"""Whose prompts an engine has cached, the latest ones."""
_DEAD = "dead"


class Request(FakeRequest, frozen=True):
    """What the head gives to an engine.

    Attributes:
        asked: tokens of the client's prompt; what is beyond them in `prompt`, another engine has put out.
    """

    asked: int = 0


class PlayedApi(FakeEngineApi):
    """What goes between head and engine is handed over as it is. A tuple stands for a frame, which has a size."""

    def encode_add(self, request: Any, engine_request_id: str, client_index: int = 0) -> Any:
        return ("add", engine_request_id, request)

    def encode_abort(self, engine_request_ids: Sequence[str]) -> Any:
        return ("abort", list(engine_request_ids))

    def decode_outputs(self, frames: Any) -> Any:
        return frames[0][0]

    def is_engine_dead(self, frames: Any) -> bool:
        return frames[0][0] is _DEAD

    def load_report(self, outputs: Any) -> LoadReport | None:
        report: LoadReport | None = outputs.scheduler_stats
        return report

    def idle_report(self, engine_index: int) -> Any:
        return FakeOutputs(engine_index=engine_index)


class PlayedEngine(Link):
    """A link in memory, and the engine at its other end. The token at each place of an answer is that place.

    Args:
        name: of its addresses.
        rng: draws how fast it is with each request.

    Attributes:
        refused_twice: requests whose id it had already, which would have killed vLLM's engine.
    """

    def __init__(self, name: str, rng: random.Random) -> None:
        self.input_addr = f"memory://{name}/in"
        self.output_addr = f"memory://{name}/out"
        self.refused_twice = 0
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[list[Any]], None] | None = None
        self._alive = True
        self._waiting: deque[tuple[str, Request]] = deque()
        self._running: dict[str, asyncio.TimerHandle] = {}
        self._cached: OrderedDict[str, int] = OrderedDict()

    @property
    def unfinished(self) -> int:
        """Requests that it has."""
        return len(self._waiting) + len(self._running)

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        self._on_message = on_message

    def pause_reading(self) -> None:
        raise NotImplementedError("the clients of a simulated week read at once")

    def resume_reading(self) -> None:
        raise NotImplementedError("the clients of a simulated week read at once")

    def drain(self) -> None:
        """What it says does not wait anywhere."""

    def close(self) -> None:
        self.end()

    def send(self, frames: Sequence[Any]) -> None:
        if not self._alive:
            raise ReplicaError(f"cannot send on {self.input_addr}")
        handle = self._add if frames[0] == "add" else self._abort
        self._loop.call_later(LINK_S, handle, *frames[1:])

    def die(self) -> None:
        """Announce its death, and be gone."""
        self._say(_DEAD)
        self.end()

    def end(self) -> None:
        """Be gone without a word; what it has is gone with it. Idempotent."""
        self._alive = False
        self._waiting.clear()
        for timer in self._running.values():
            timer.cancel()
        self._running.clear()

    def _add(self, attempt: str, request: Request) -> None:
        if self._alive:
            self.refused_twice += attempt in self._running
            self._waiting.append((attempt, request))
            self._admit()

    def _abort(self, attempts: Sequence[str]) -> None:
        for attempt in attempts:
            timer = self._running.pop(attempt, None)
            if timer is not None:
                timer.cancel()
        self._waiting = deque(each for each in self._waiting if each[0] not in attempts)
        if self._alive:
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < PLACES:
            attempt, request = self._waiting.popleft()
            cached = self._match(request)
            seconds = (len(request.prompt) - cached) / PREFILL_TOKENS_PER_S + TOKEN_S
            self._running[attempt] = self._loop.call_later(seconds, self._begin, attempt, request, cached)

    def _match(self, request: Request) -> int:
        """Prompt tokens that are cached, whole blocks; and those of this prompt are from here on."""
        session = request.session or ""
        cached = min(self._cached.pop(session, 0), len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        if session:
            self._cached[session] = len(request.prompt)
            if len(self._cached) > _SESSIONS:
                self._cached.popitem(last=False)
        return cached

    def _begin(self, attempt: str, request: Request, cached: int) -> None:
        at = len(request.prompt) - request.asked
        self._tell(attempt, range(at, at + 1), request, cached)
        self._go_on(attempt, request, at + 1)

    def _go_on(self, attempt: str, request: Request, at: int) -> None:
        if at < request.length:
            count = -(-(request.length - at) // 2) if at < request.length // 2 else request.length - at
            seconds = count * TOKEN_S * self._rng.uniform(0.8, 1.2)
            self._running[attempt] = self._loop.call_later(seconds, self._produce, attempt, request, at, at + count)

    def _produce(self, attempt: str, request: Request, at: int, end: int) -> None:
        self._tell(attempt, range(at, end), request)
        self._go_on(attempt, request, end)

    def _tell(self, attempt: str, places: range, request: Request, cached: int | None = None) -> None:
        finish = "length" if places.stop >= request.length else None
        if finish is not None:
            del self._running[attempt]
            self._admit()
        tokens = [place % VOCABULARY for place in places]
        report = LoadReport(len(self._waiting), len(self._running), len(self._running) / PLACES)
        output = FakeOutput(attempt, tokens, finish, cached is not None, cached)
        outputs = FakeOutputs(outputs=[output], scheduler_stats=report)  # type: ignore[arg-type]
        self._loop.call_later(LINK_S, self._say, outputs)

    def _say(self, message: Any) -> None:
        if self._alive and self._on_message is not None:
            self._on_message([(message,)])
