"""A way for any thread to end another thread's poll."""

import os


class Wakeup:
    """A flag that a poller can wait for. `set` and `clear` are thread-safe; neither may be called after `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that is readable while the flag is set."""
        return self._fd

    def set(self) -> None:
        """Set the flag."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Unset the flag, whether it was set or not."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)
