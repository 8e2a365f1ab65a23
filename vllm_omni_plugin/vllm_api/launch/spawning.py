"""Spawning of processes: one lock for all, descriptions of exit codes, removal of socket files."""

import signal
import threading
from pathlib import Path

SPAWN_LOCK = threading.Lock()
"""Held while a process is spawned, but not while it loads. During a spawn, vLLM changes state of the whole process and
restores it: environment variables, torch's thread count, with `--numa-bind` the program that multiprocessing starts. A
second spawn at the same time would inherit that state, or restore the wrong one."""


EXIT_TIMEOUT_S = 15.0
"""Seconds for an idle engine to exit. vLLM's 5 s are too short where several engines share few cores."""


def describe_exit(code: int | None) -> str:
    """How a process ended, as the end of a sentence; `code` is negative for a signal, None for a running process."""
    if code is None:
        return "has not ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def remove_ipc_files(*addresses: str) -> None:
    """Remove the socket files of ipc addresses that are no longer bound; libzmq leaves them."""
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
