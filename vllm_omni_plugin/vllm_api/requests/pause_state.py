"""Whether an engine schedules, and which of its memory is put away."""

from dataclasses import dataclass
from typing import Any

Call = tuple[str, tuple[Any, ...]]
"""A utility method of the engine core and its arguments."""

PAUSE_CALLS = frozenset({"pause_generation", "pause_scheduler", "resume_scheduler", "sleep", "wake_up"})
_PAUSES = ("pause_generation", "pause_scheduler")
_ALL_MEMORY = frozenset({"weights", "kv_cache"})


def pause_mode(method: str, args: tuple[Any, ...]) -> str | None:
    """What a call does with the requests in flight, see `PauseState.pause_mode`; None: it brings nothing to rest."""
    if method not in (*_PAUSES, "sleep"):
        return None
    place = 0 if method in _PAUSES else 1
    # What is not given is vLLM's default.
    mode: str = args[place] if len(args) > place else "abort"
    return mode


@dataclass
class PauseState:
    """What pausing, sleeping and waking leave behind in vLLM's engine core and executor.

    Kept as the state and not as a list of calls: training loops repeat these calls without end, in many orders.

    Attributes:
        pause_mode: the mode in which scheduling is paused, or None while it runs.
        asleep: tags of the memory that is put away.
        sleep_level: how the weights were put away; means nothing while they are resident.
        refuses: whether requests are refused until it resumes, and not only wait.
    """

    pause_mode: str | None = None
    asleep: frozenset[str] = frozenset()
    sleep_level: int = 1
    refuses: bool = False

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """As `pause`, and refuse requests, but in the mode that keeps them."""
        self.pause(mode)
        self.refuses = mode != "keep"

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling."""
        self.pause_mode = mode

    def resume(self) -> None:
        """Schedule again."""
        self.pause_mode = None
        self.refuses = False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and, from level 1 on, put all memory away. The level of weights that sleep already does not change."""
        self.pause_mode = mode
        if level >= 1 and "weights" not in self.asleep:
            self.asleep, self.sleep_level = _ALL_MEMORY, level

    def release_kv_cache(self) -> None:
        """Put the KV cache away."""
        self.asleep |= {"kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring memory back, all or by tags, and resume once all is resident. A tag that is awake voids the others."""
        memory = self.asleep if tags is None else frozenset(tags) - {"scheduling"}
        if memory <= self.asleep:
            self.asleep -= memory
        if not self.asleep:
            self.resume()

    def replay(self) -> list[Call]:
        """The calls that bring a fresh engine to this state.

        An engine may have been told by another head and hold requests that came since: they are not aborted, and what
        they use of its cache stays.
        """
        mode = "keep" if self.pause_mode == "keep" else "wait"
        # Before the other calls, none of which changes whether requests are refused.
        calls: list[Call] = [("pause_generation", ("wait", False))] if self.refuses else []
        pause: list[Call] = [] if calls and mode == "wait" else [("pause_scheduler", (mode, False))]
        if not self.asleep:
            return calls if self.pause_mode is None else calls + pause
        if "weights" not in self.asleep:
            calls += [*pause, ("release_kv_cache_memory", ())]
        else:
            calls.append(("sleep", (self.sleep_level, mode)))
            if "kv_cache" not in self.asleep:
                calls.append(("wake_up", (["kv_cache"],)))
        if self.pause_mode is None:
            calls.append(("resume_scheduler", ()))
        return calls

    def undo(self) -> list[Call]:
        """The calls that bring an engine from this state to that of a fresh one."""
        if self.asleep:
            return [("wake_up", (None,)), ("resume_scheduler", ())]
        return [] if self.pause_mode is None else [("resume_scheduler", ())]
