"""Main module of the coordinator's process. It reads its arguments from standard input."""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import threading

import msgspec

from vllm_omni_plugin.coordinator.process.coordinator_process import ALIVE_BYTE, Answer, ChildArguments
from vllm_omni_plugin.coordinator.server.service import OmniCoordinator
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError

EXIT_REFUSED = 2
EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until standard input ends. Exit status: 0 if told to end, `EXIT_REFUSED` if its arguments are wrong."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _die_with_parent()
    _allow_many_connections()
    arguments = msgspec.structs.asdict(msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildArguments))
    alive_interval, secret_file = arguments.pop("alive_interval"), arguments.pop("secret_file")
    try:
        secrets = Secrets.from_file(secret_file) if secret_file else None
        coordinator = OmniCoordinator(**arguments, secrets=secrets)
    except ConfigError as error:
        _answer(str(error))
        return EXIT_REFUSED
    _answer((coordinator.router_zmq_addr, coordinator.pub_zmq_addr))
    orderly = threading.Event()
    threading.Thread(target=_close_at_end_of_input, args=(coordinator, orderly), daemon=True).start()
    while not coordinator.wait_for_shutdown(alive_interval):
        coordinator.wait_for_loop_pass()
        _write(ALIVE_BYTE)
    return 0 if orderly.is_set() else EXIT_FAILED


def _close_at_end_of_input(coordinator: OmniCoordinator, orderly: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    orderly.set()
    coordinator.close()


def _answer(answer: Answer) -> None:
    _write(msgspec.json.encode(answer) + b"\n")


def _write(data: bytes) -> None:
    # If the parent is gone, standard input ends, too.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), data)


def _allow_many_connections() -> None:
    # Each replica and each head needs a descriptor, and the usual limit is 1,024.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _die_with_parent() -> None:
    # The end of standard input is not enough: another child of the parent may hold the other end of the pipe.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
