"""Keeps process 1 of a container free for its duty: to wait for each process whose parent has ended.

A head or node is process 1 of its container unless an init is in front of it. The kernel gives it all orphans, for
example the workers of a killed engine, and an orphan stays in the process table after its end until somebody waits for
it. A server must not wait for any child: it would take exit statuses that subprocess and multiprocessing wait for. So
the server goes on in a child, and process 1 executes this file, which needs the standard library only.
"""

import os
import signal
import sys

_SI_KERNEL = 0x80
_SIGNAL_EXIT = 128


def leave_process_1() -> None:
    """If this is process 1, return in a child of it, which has everything but the threads. Else do nothing."""
    if os.getpid() == 1:
        continue_in_child()


def continue_in_child() -> None:
    """Return in a child. This process passes signals on to it, waits for all its children, and ends with its status."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child:
        try:
            # Signals stay blocked, and those that came meanwhile stay pending.
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(child)])
        finally:
            # Only if nothing could be executed: there must not be two servers.
            os._exit(os.EX_OSERR)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_signals_on() -> None:
    """Pass signals on to the child whose id is the first argument, and wait for all children until it has ended."""
    child = int(sys.argv[1])
    while True:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo == signal.SIGCHLD:
            _wait_for_ended(child)
        elif received.si_code != _SI_KERNEL:
            # The kernel sends a terminal's Ctrl-C to the whole process group, and the child is in it.
            os.kill(child, received.si_signo)


def _wait_for_ended(child: int) -> None:
    """Wait for all children that have ended; exit with the status of this one if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            sys.exit(code if code >= 0 else _SIGNAL_EXIT - code)
        if pid == 0:
            return


if __name__ == "__main__":
    pass_signals_on()
