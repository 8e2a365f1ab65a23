"""Completions in the background, each with all that its client saw of it."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Self

import httpx

from .server import MODEL, Server

MAX_CONCURRENT = 64
TIMEOUT_S = 240.0
_PATH = "/v1/completions"


@dataclass
class Outcome:
    """What a client saw of one request.

    Attributes:
        completed: tokens that the final usage report names, None without such a report.
        started: set once the client has seen output.
    """

    tokens: int
    status: int = 0
    completed: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    error_codes: list[int] = field(default_factory=list)
    text: str = ""
    started: Event = field(default_factory=Event)

    @property
    def finished_whole(self) -> bool:
        """Whether everything that was asked for came, and nothing else."""
        return (self.status, self.completed, self.finish_reasons, self.errors) == (200, self.tokens, ["length"], [])


class Load:
    """Sends completions to a server, or over a client's connections, in threads.

    A context manager; leaving it waits for all of them.
    """

    def __init__(self, to: Server | httpx.Client) -> None:
        self._http = to.http(TIMEOUT_S) if isinstance(to, Server) else to
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="load")
        self._sent: list[tuple[Outcome, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._http.close()

    def send(self, tokens: int, stream: bool, prompt: str | list[int] = "count", **options: Any) -> Outcome:
        """Ask for exactly so many tokens; returns at once, and what it returns is filled in as the answer comes."""
        outcome = Outcome(tokens)
        ask = self._ask_for_stream if stream else self._ask
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **options}
        self._sent.append((outcome, self._threads.submit(ask, outcome, body)))
        return outcome

    def wait(self) -> None:
        for _, future in self._sent:
            future.result(TIMEOUT_S)

    def _ask(self, outcome: Outcome, body: dict[str, Any]) -> None:
        response = self._http.post(_PATH, json=body)
        outcome.status = response.status_code
        _note(outcome, response.json())

    def _ask_for_stream(self, outcome: Outcome, body: dict[str, Any]) -> None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", _PATH, json=body) as response:
            outcome.status = response.status_code
            if response.status_code != httpx.codes.OK:
                _note(outcome, json.loads(response.read()))
                return
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(outcome, json.loads(line.removeprefix("data: ")))


def streamed(load: Load, streams: int, tokens: int) -> list[Outcome]:
    """Ask for so many streams of so many tokens, the same ones each time."""
    return [load.send(tokens, stream=True, prompt=f"number {n}", temperature=0) for n in range(streams)]


def undisturbed(server: Server, streams: int, tokens: int) -> list[str]:
    """The texts of these streams."""
    with Load(server) as load:
        outcomes = streamed(load, streams, tokens)
    assert all(outcome.finished_whole for outcome in outcomes)
    return [outcome.text for outcome in outcomes]


@contextmanager
def no_stream_suffers(server: Server, texts: list[str], tokens: int) -> Iterator[Load]:
    """What happens in the block, after all streams have begun, changes nothing of these texts."""
    with Load(server) as load:
        sent = streamed(load, len(texts), tokens)
        assert all(outcome.started.wait(60) for outcome in sent)
        yield load
    assert [outcome for outcome in sent if not outcome.finished_whole] == []
    assert [outcome.text for outcome in sent] == texts


@contextmanager
def constant_load(heads: Sequence[Server], clients: int, tokens: int, pause_s: float = 0.0) -> Iterator[list[Outcome]]:
    """Clients, shared out to the heads, that send one request after the other as long as the block runs.

    Args:
        clients: how many there are; of those of each head, every second one asks for streams.
        pause_s: seconds between the requests of a client.
    """
    over = Event()
    outcomes: list[Outcome] = []

    def send(client: int) -> None:
        while not over.wait(pause_s):
            with Load(heads[client % len(heads)]) as load:
                outcomes.append(load.send(tokens, stream=client // len(heads) % 2 == 0, prompt=f"client {client}"))

    with ThreadPoolExecutor(clients) as threads:
        sending = [threads.submit(send, client) for client in range(clients)]
        try:
            yield outcomes
        finally:
            over.set()
        for client in sending:
            client.result()


def _note(outcome: Outcome, message: dict[str, Any]) -> None:
    """Take down one answer or one event of a stream."""
    if "error" in message:
        outcome.errors.append(message["error"]["message"])
        outcome.error_codes.append(message["error"]["code"])
        return
    if message.get("usage"):
        outcome.completed = message["usage"]["completion_tokens"]
    for choice in message["choices"]:
        outcome.text += choice["text"]
        outcome.started.set()
        if choice.get("finish_reason") is not None:
            outcome.finish_reasons.append(choice["finish_reason"])
