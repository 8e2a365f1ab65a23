"""What the routes under `/omni` use, whichever front end serves the requests."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

from prometheus_client import REGISTRY

from vllm_omni_plugin.admin.admission_file import AdmissionFile
from vllm_omni_plugin.admin.explain import PromptReader, explain
from vllm_omni_plugin.admin.head_drain import HeadDrain
from vllm_omni_plugin.admin.replica_admin import FleetAdmin
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.fleet_view import FleetView
from vllm_omni_plugin.admin.watch.token_rates import TokenRates
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls


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
