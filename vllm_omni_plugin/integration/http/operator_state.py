"""The routes under `/omni`, whichever front end serves the requests: who may use them, and what they use."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

from prometheus_client import REGISTRY
from vllm import envs

from vllm_omni_plugin.admin.access import Access, KeyCheck
from vllm_omni_plugin.admin.admin_keys import read_admin_keys
from vllm_omni_plugin.admin.explain import PromptReader, explain
from vllm_omni_plugin.admin.operator_actions import AdmissionFile, FleetAdmin, HeadDrain
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.fleet_view import FleetView, TokenRates
from vllm_omni_plugin.config import ADMIN_KEY_FLAG, OmniConfig
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls

logger = init_logger(__name__)


def has_one_of(keys: Sequence[str]) -> KeyCheck:
    """vLLM's check of a bearer token, in constant time. Its middleware does not check all paths."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    # The check does not use the application behind the middleware.
    has_key: KeyCheck = AuthenticationMiddleware(_no_app, list(keys)).verify_token
    return has_key


def has_api_key(args: Any) -> KeyCheck:
    """The check of the server's API keys: always true without any."""
    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return has_one_of(keys) if keys else lambda _: True


def make_access(
    args: Any, has_key: KeyCheck, local_key: Callable[[], str | None], *, unix_socket: bool = False
) -> Access:
    """Who may use the routes of operators. Where no file has keys, `local_key` makes one for this user's commands."""
    if args.omni_admin_key_file:
        keys = read_admin_keys(args.omni_admin_key_file, ADMIN_KEY_FLAG)
        return Access(has_key, has_one_of(keys), has_key_file=True)
    key = local_key()
    has_admin_key = has_one_of([key] if key else [])
    return Access(has_key, has_admin_key, unix_socket=unix_socket, loopback=bool(args.omni_admin_loopback))


def warn_of_open_access(options: OmniConfig) -> None:
    """Log what an operator may not expect: who may change the fleet, and a file of keys that others can read."""
    if options.admin_loopback:
        logger.warning(
            "With --omni-admin-loopback, everybody who has a loopback address of this machine may change the fleet "
            "(DELETE, drain, resume) and use explain: its other users, and who reaches a proxy or forwarder that runs "
            "on it."
        )
    elif options.admin_key_file is not None and os.stat(options.admin_key_file).st_mode & 0o077:
        logger.warning("%s %s: others may access it; run `chmod 600` on it.", ADMIN_KEY_FLAG, options.admin_key_file)


async def _no_app(*_: Any) -> None:
    raise NotImplementedError


class OperatedFleet(Protocol):
    @property
    def orchestrator(self) -> Orchestrator: ...

    @property
    def fleet_calls(self) -> FleetCalls: ...

    @property
    def stages(self) -> FleetStages: ...


def set_operator_state(
    state: Any,
    fleet: OperatedFleet,
    options: OmniConfig,
    drain: HeadDrain,
    *,
    read_prompt: PromptReader,
    is_ending: Callable[[], bool],
    is_over: Callable[[], bool],
    reload_others: Callable[[], None] = lambda: None,
    record_statistics: Callable[[], None] = lambda: None,
) -> None:
    """Set what the routes of operators use in an application's state, and handle SIGHUP, on the main thread's loop.

    `is_ending`: the head takes no new requests; `is_over`: streams must end, because the server closes. `reload_others`
    makes the other API servers of this command read the admission file. `record_statistics` is called before vLLM's
    metrics are read.
    """
    orchestrator = fleet.orchestrator
    state.omni_explain = partial(explain, orchestrator, read_prompt, fleet.stages.prompt_stage)
    state.omni_fleet = FleetAdmin(orchestrator, fleet.fleet_calls, time.monotonic)
    state.omni_drain = drain
    rates = TokenRates(REGISTRY, time.monotonic, record_statistics)
    view = FleetView(orchestrator, drain, is_ending, rates, _head(), fleet.stages.pipeline)
    state.omni_broadcast = FleetBroadcast(view, orchestrator.events, is_over)
    if options.admission is not None:
        state.omni_admission_file = file = AdmissionFile(options.admission, orchestrator, reload_others)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, file.on_signal)
        # A signal may have come since the file was read.
        file.on_signal()


def _head() -> dict[str, str]:
    from vllm import __version__

    name = f"{socket.gethostname()}, process {os.getpid()}"
    return {"name": name, "vllm": __version__, "plugin": version("vllm-omni-plugin")}
