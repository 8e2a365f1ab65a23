"""Processes are spawned one at a time, each end has a name, and the files of their sockets are removed."""

import signal
import threading
from pathlib import Path

SPAWN_LOCK = threading.Lock()
"""Held while a process is spawned, never while it loads. vLLM changes what belongs to all threads meanwhile, and puts
it back: environment variables, torch's number of threads, with `--numa-bind` the program that multiprocessing starts.
Whoever spawned beside it would pass that on, or put the wrong things back."""


def exit_reason(code: int | None) -> str:
    """How a process ended, in words that follow its name.

    Args:
        code: its exit code, negative for a signal; None: it has not ended.
    """
    if code is None:
        return "has not ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def remove_ipc_files(*addresses: str) -> None:
    """Remove the files of ipc addresses that are bound no more, which libzmq leaves behind; others have none."""
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
