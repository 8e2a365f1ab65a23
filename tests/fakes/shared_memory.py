"""A process that shares memory with its child. It imports nothing heavy, since it is spawned."""

import os
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any


def share_memory_with_worker(told: Any) -> None:
    memory = SharedMemory(create=True, size=4096)
    if os.fork():
        told.send(memory.name)
    time.sleep(600)
