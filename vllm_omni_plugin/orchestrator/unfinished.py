"""The requests that have not ended, and waiting for the last of them."""

import asyncio
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class UnfinishedRequests(dict[str, S], Generic[S]):
    """States of unfinished requests by the client's id. Lives on the orchestrator's loop.

    Only `pop`, `del` and `clear` take requests out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiter: asyncio.Future[None] | None = None

    async def until_none(self) -> None:
        """Return once there is none. One at a time may wait."""
        while self:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def pop(self, request_id: str, *default: Any) -> Any:
        """As of any dictionary."""
        state = super().pop(request_id, *default)
        self._tell()
        return state

    def __delitem__(self, request_id: str) -> None:
        super().__delitem__(request_id)
        self._tell()

    def clear(self) -> None:
        """As of any dictionary."""
        super().clear()
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self and not self._waiter.done():
            self._waiter.set_result(None)
