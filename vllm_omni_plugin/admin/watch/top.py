"""The fleet in a terminal: the table of `vllm-omni-plugin top`. Needs only the standard library."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from vllm_omni_plugin.admin.watch.fleet_text import event_line, headline, plain, rows, table
from vllm_omni_plugin.errors import ServerUnavailableError

_EVENTS = 10
_CLEAR = "\x1b[H\x1b[2J"
"""Makes a terminal begin again at its top."""


class Top:
    """Shows what a head streams: one table after the other, of which a terminal shows the last.

    Args:
        read: opens the stream behind the event with an id, and yields kind and content of its messages.
        out: where to write.
        pause: waits until the head is asked again that has not answered.
    """

    def __init__(
        self, read: Callable[[str], Iterator[tuple[str, Any]]], out: TextIO, pause: Callable[[], object]
    ) -> None:
        self._read = read
        self._out = out
        self._pause = pause
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)

    def once(self) -> None:
        """Show the fleet.

        Raises:
            ServerUnavailableError: nobody answers.
            ValueError, LookupError, TypeError: who answers is no head of a fleet.
        """
        self._write(next(self._tables()))

    def run(self) -> None:
        """Show it again and again, also when the head has been away. Raises as `once`, as long as none has answered."""
        form = _CLEAR + "{}" if self._out.isatty() else "{}\n"
        has_answered = False
        while True:
            try:
                for shown in self._tables():
                    has_answered = True
                    self._write(form.format(shown))
            except ServerUnavailableError as error:
                if not has_answered:
                    raise
                self._write(plain(f"{error}; trying again") + "\n")
                self._pause()

    def _tables(self) -> Iterator[str]:
        """One for each state, until the stream ends or breaks."""
        is_fleet = False
        for kind, content in self._read(self._events[-1]["id"] if self._events else ""):
            is_fleet = True
            if kind == "state":
                yield headline(content) + table(rows(content)) + "".join(map(event_line, self._events))
            elif kind != "history":
                self._note(content)
        raise ServerUnavailableError("the head has ended the stream") if is_fleet else ValueError("no stream of events")

    def _note(self, event: dict[str, Any]) -> None:
        # Of another process, which answers now, from its first event on.
        if self._events and _log_of(event) != _log_of(self._events[-1]):
            self._events.clear()
        self._events.append(event)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _log_of(event: dict[str, Any]) -> str:
    return str(event["id"]).partition("-")[0]
