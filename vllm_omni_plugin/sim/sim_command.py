"""`vllm-omni-plugin sim`: a headless node whose engines are simulated."""

import argparse
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_omni_plugin.config import integer
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import raise_limits
from vllm_omni_plugin.sim.model.engine_settings import DEFAULT_CONCURRENCY, EngineSettings

_PROG = "vllm-omni-plugin sim"
_DESCRIPTION = """Start simulated replicas of a model that join a head as headless nodes do. They need no accelerator
and little memory. Their answers are a function of the prompt, and a linear model computes how long they take."""
_EPILOG = """Takes every argument of `vllm serve MODEL --headless`; give the ones that the head has, too.
Use --help=SimConfig for the arguments of the simulation, --help=OmniConfig for those of the fleet."""

_MARGINAL_COST = 0.01
"""Time of each further sequence, as a share of an iteration with one sequence."""
_DESCRIPTORS_PER_ENGINE = 70
"""A simulated engine has the other ends of its replica's sockets in the same process."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SimConfig", "Simulated engines.")
    group.add_argument("--replicas", type=integer(1), default=1, metavar="N", help="Replicas to start.")
    group.add_argument(
        "--tokens-per-second",
        type=_positive,
        default=100.0,
        metavar="N",
        help="Tokens that a sequence alone in its engine gets per second; each further one makes iterations about 1%% "
        "longer.",
    )
    group.add_argument(
        "--prefill-tokens-per-second",
        type=_positive,
        default=10_000.0,
        metavar="N",
        help="Prompt tokens that an engine computes per second.",
    )
    group.add_argument(
        "--kv-blocks",
        type=integer(1),
        metavar="N",
        # The last part prints nothing, and keeps vLLM's formatter from adding a default of None.
        help=f"Blocks of KV memory of each engine. (default: room for {DEFAULT_CONCURRENCY} requests of the maximum "
        "length)%(default).0s",
    )


def settings_of(vllm_config: Any, args: argparse.Namespace) -> EngineSettings:
    """Capacities from vLLM's configuration, speeds from our flags. Raises ConfigError if the KV memory is too small."""
    iteration_s = 1.0 / args.tokens_per_second
    return EngineSettings.of(
        vllm_config,
        args.kv_blocks,
        bool(vllm_config.cache_config.enable_prefix_caching),
        step_s=iteration_s * (1 - _MARGINAL_COST),
        prefill_token_s=1.0 / args.prefill_tokens_per_second,
        sequence_s=iteration_s * _MARGINAL_COST,
    )


def run_sim(arguments: Sequence[str]) -> int:
    from vllm_omni_plugin.errors import ConfigError
    from vllm_omni_plugin.integration.command_line import parse_options
    from vllm_omni_plugin.integration.options.additional_config import exit_usage_error
    from vllm_omni_plugin.integration.processes.headless import serve_replicas
    from vllm_omni_plugin.sim.sim_launcher import EngineHost
    from vllm_omni_plugin.vllm_api.versions.serve_arguments import parse_headless_args

    args = parse_headless_args(arguments, _PROG, _DESCRIPTION, _EPILOG, add_flags)
    args.omni_dp_size_local = args.replicas
    try:
        if args.nnodes > 1:
            raise ConfigError(f"argument --nnodes: {args.nnodes}: a simulated replica is in one process")
        options = parse_options(args)
    except ConfigError as error:
        exit_usage_error(error, _PROG)
    assert options is not None, "the number of replicas is one of our flags"
    # As `vllm serve` with our flags.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_limits(args.replicas, more=_DESCRIPTORS_PER_ENGINE)
    with EngineHost() as host:
        return serve_replicas(args, options, partial(_launcher, args, host), _PROG)


def _launcher(
    args: argparse.Namespace, host: Any, vllm_config: Any, executor_class: Any, log_stats: bool, *_: Any, **__: Any
) -> Any:
    """Used in place of `new_launcher`. It spawns no process, so it does not call `on_spawn`."""
    from vllm_omni_plugin.sim.sim_launcher import SimLauncher
    from vllm_omni_plugin.vllm_api.codecs.sim_protocol import ready_response

    settings = settings_of(vllm_config, args)

    def ready(replica_id: int) -> bytes:
        return ready_response(vllm_config, replica_id, settings.kv_blocks, settings.block_size)

    return SimLauncher(host, settings, ready, log_stats=log_stats)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
