"""The pause and sleep state of an engine: whether it schedules, and which of its memory is offloaded."""

from typing import Annotated, Any

from msgspec import Meta, Struct

EngineCall = tuple[str, tuple[Any, ...]]
"""A utility method of the engine core and its arguments."""

PAUSE_CALLS = frozenset({"pause_generation", "pause_scheduler", "resume_scheduler", "sleep", "wake_up"})
_PAUSES = ("pause_generation", "pause_scheduler")
_ALL_MEMORY = frozenset({"weights", "kv_cache"})


def pause_mode(method: str, args: tuple[Any, ...]) -> str | None:
    """What becomes of running requests at this call: aborted, awaited or kept; None if it pauses nothing."""
    if method not in (*_PAUSES, "sleep"):
        return None
    place = 0 if method in _PAUSES else 1
    # vLLM's default is "abort".
    mode: str = args[place] if len(args) > place else "abort"
    return mode


class PauseState(Struct):
    """The state in vLLM's engine core and executor. Not a list of calls, which training loops repeat without end."""

    pause_mode: str | None = None
    """None while scheduling is not paused."""
    asleep: frozenset[str] = frozenset()
    """Tags of the memory that is offloaded or discarded."""
    sleep_level: Annotated[int, Meta(ge=0, le=2)] = 1
    """The level at which the weights went to sleep; no meaning while they are resident."""
    refuses: bool = False
    """Whether requests are refused until it resumes; otherwise they wait."""
    was_set: bool = False
    """Whether there was such a call; without one, an engine keeps the state in which it is found."""

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pause, and refuse requests unless the mode is `keep`."""
        self.pause(mode)
        self.refuses = mode != "keep"

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.pause_mode, self.was_set = mode, True

    def resume(self) -> None:
        self.pause_mode, self.was_set = None, True
        self.refuses = False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause; from level 1 on, all memory sleeps too. Weights that sleep already keep their level."""
        self.pause(mode)
        if level >= 1 and "weights" not in self.asleep:
            self.asleep, self.sleep_level = _ALL_MEMORY, level

    def release_kv_cache(self) -> None:
        self.asleep |= {"kv_cache"}
        self.was_set = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake memory up, all or by tags; resume once all is awake. If one of the tags is awake, none is woken."""
        memory = self.asleep if tags is None else frozenset(tags) - {"scheduling"}
        if memory <= self.asleep:
            self.asleep -= memory
        if not self.asleep:
            self.resume()

    def replay(self) -> list[EngineCall]:
        """The calls that bring a fresh engine to this state.

        They abort no requests and clear no caches: another head may have made the same calls before, and the engine may
        have requests since.
        """
        mode = "keep" if self.pause_mode == "keep" else "wait"
        # First, since the other calls do not change whether requests are refused.
        calls: list[EngineCall] = [("pause_generation", ("wait", False))] if self.refuses else []
        pause: list[EngineCall] = [] if calls and mode == "wait" else [("pause_scheduler", (mode, False))]
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

    def undo(self) -> list[EngineCall]:
        """The calls that bring an engine from this state to that of a fresh one."""
        if self.asleep:
            # It also resumes.
            return [("wake_up", (None,))]
        return [] if self.pause_mode is None else [("resume_scheduler", ())]
