"""A link in memory: messages of the head are recorded, messages of the engine are method calls."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tests.fakes.engine_api import DEAD_FRAME, FakeOutput, FakeOutputs, FakeResult, FakeUtilityOutput
from vllm_omni_plugin.errors import MessageTooLargeError, ReplicaError


class FakeLink:
    """Implements `Link`, and plays the engine at its other end.

    Attributes:
        added: engine-side ids of the submitted requests, in order.
        prompts: their prompts by engine-side id.
        aborted: engine-side ids of aborted requests, in order.
        calls: call id, method and arguments of the utility calls, in order.
        broken: `send` fails with `ReplicaError`.
        too_large: `send` fails with `MessageTooLargeError`.
    """

    def __init__(self, name: str = "replica") -> None:
        self.input_addr = f"memory://{name}/in"
        self.output_addr = f"memory://{name}/out"
        self.added: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.calls: list[tuple[int, str, list[Any]]] = []
        self.broken = False
        self.too_large = False
        self.closed = False
        self.paused = True
        self.on_call: Callable[[FakeLink, int, str, list[Any]], None] | None = None
        self._answered: set[str] = set()
        self._arrived: deque[bytes] = deque()
        self._on_message: Callable[[list[Any]], None] | None = None

    def send(self, frames: Sequence[Any]) -> None:
        if self.broken or self.closed:
            raise ReplicaError(f"cannot send on {self.input_addr}")
        if self.too_large:
            raise MessageTooLargeError("it is too large")
        kind, body = frames[0], msgspec.json.decode(frames[1])
        if kind == b"add":
            self.added.append(body["request_id"])
            self.prompts[body["request_id"]] = body["prompt"]
        elif kind == b"abort":
            self.aborted += body
        else:
            self.calls.append(tuple(body))
            if self.on_call is not None:
                # An answer cannot arrive before the call was sent.
                asyncio.get_running_loop().call_soon(self.on_call, self, *body)

    def start_reading(self, on_message: Callable[[list[Any]], None]) -> None:
        self._on_message = on_message
        self.resume_reading()

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        self.drain()

    def drain(self) -> None:
        while self._arrived and self._on_message is not None:
            self._on_message([self._arrived.popleft()])

    def close(self) -> None:
        self.closed = True

    def say(self, frame: bytes) -> None:
        self._arrived.append(frame)
        if not self.paused:
            self.drain()

    def say_dead(self) -> None:
        self.say(DEAD_FRAME)

    def report(self, running: int) -> None:
        """Send statistics only: `running` requests, none waiting, 1% of the KV memory for each."""
        self.say(msgspec.json.encode(FakeOutputs(scheduler_stats=running)))

    def output(
        self,
        engine_request_id: str,
        *tokens: int,
        finish_reason: str | None = None,
        cached: int | None = None,
        running: int | None = None,
    ) -> None:
        """Send one output of a request, by default with one token. `cached` is sent with the first output of a request;
        `running` adds statistics to the message.
        """
        first = engine_request_id not in self._answered
        self._answered.add(engine_request_id)
        output = FakeOutput(engine_request_id, list(tokens or (0,)), finish_reason, first, cached)
        self.say(msgspec.json.encode(FakeOutputs(outputs=[output], scheduler_stats=running)))

    def answer(self, call_id: int, result: Any = None) -> None:
        self.say(msgspec.json.encode(FakeOutputs(utility_output=FakeUtilityOutput(call_id, None, FakeResult(result)))))

    def refuse(self, call_id: int, message: str = "no") -> None:
        self.say(msgspec.json.encode(FakeOutputs(utility_output=FakeUtilityOutput(call_id, message))))


def answer_calls(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
    """An `on_call` that answers each call with the name of its method."""
    link.answer(call_id, method)


def refuse_calls(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
    link.refuse(call_id, f"{link.input_addr} refuses {method}")
