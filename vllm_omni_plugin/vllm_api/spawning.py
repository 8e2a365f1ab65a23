"""Processes are spawned one at a time."""

import threading

SPAWNING = threading.Lock()
"""Held while a process is spawned, never while it loads. vLLM changes what belongs to all threads meanwhile, and puts
it back: environment variables, torch's number of threads, with `--numa-bind` the program that multiprocessing starts.
Whoever spawned beside it would pass that on, or put the wrong things back."""
