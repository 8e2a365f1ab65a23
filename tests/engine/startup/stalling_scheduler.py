"""A scheduler that stands still in one engine of several while a test wants it to. The engine answers all calls."""

import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

_STALL_FILE = "STALL_FILE"
"""Environment variable with the path of a file; while it exists, it has the process id of the engine that stalls."""


class StallingScheduler(AsyncScheduler):
    """Has no room for any token in a step while its engine is to stall."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        room = self.max_num_scheduled_tokens
        if self._is_stalled():
            self.max_num_scheduled_tokens = 0
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = room

    def _is_stalled(self) -> bool:
        try:
            return Path(os.environ[_STALL_FILE]).read_text() == str(os.getpid())
        except FileNotFoundError:
            return False
