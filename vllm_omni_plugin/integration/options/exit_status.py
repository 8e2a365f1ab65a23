"""How a command ends that serves in several processes: its signals and errors as its exit status."""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.integration.options.additional_config import exit_usage_error
from vllm_omni_plugin.replicas.replica_server.node import SIGNALS

_EXIT_OK = 0
_EXIT_FAILED = 1


def exit_status_of(serve: Callable[[ExitStack], None]) -> int:
    """Run `serve`, and then close its resources; returns the exit status of the process.

    Until its event loop handles them, signals end it with status 0. A ConfigError is a usage error, another OmniError
    the last line of its log.
    """
    _on_signals(_exit)
    with ExitStack() as resources:
        try:
            serve(resources)
        except ConfigError as error:
            exit_usage_error(error)
        except OmniError as error:
            sys.stderr.write(f"vllm serve: error: {error}\n")
            return _EXIT_FAILED
        finally:
            # The remaining cleanup is short, and must not be interrupted.
            _on_signals(signal.SIG_IGN)
    return _EXIT_OK


def _on_signals(handler: Any) -> None:
    for signum in SIGNALS:
        signal.signal(signum, handler)


def _exit(signum: int, frame: Any) -> None:
    raise SystemExit(_EXIT_OK)
