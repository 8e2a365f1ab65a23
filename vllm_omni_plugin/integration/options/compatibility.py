"""The flags of vLLM that cannot be used with a fleet, and the engine arguments that a fleet sets."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm import envs

from vllm_omni_plugin.config import host
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.vllm_api.versions.differences import RUST_FRONT_END
from vllm_omni_plugin.vllm_api.versions.supported import installed_version

_EVERY_RANK = "every data-parallel rank is a replica of the fleet, which balances over all of them itself"
_MEET = "ranks on several machines meet by --nnodes, --node-rank and --master-addr"
_HTTP_ONLY = "a fleet works with vLLM's HTTP server only"


def _is_given(value: Any) -> bool:
    return value is not None


_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "grpc": (bool, _HTTP_ONLY),
    "data_parallel_rank": (_is_given, _EVERY_RANK),
    "data_parallel_start_rank": (_is_given, _MEET),
    "data_parallel_external_lb": (bool, _EVERY_RANK),
    "data_parallel_hybrid_lb": (bool, _EVERY_RANK),
    "data_parallel_multi_port_external_lb": (bool, _EVERY_RANK),
    "data_parallel_address": (_is_given, _MEET),
    "data_parallel_rpc_port": (_is_given, _MEET),
    "data_parallel_backend": (lambda value: value == "ray", "ranks are processes of their replica's node"),
    "distributed_executor_backend": (
        lambda value: value == "external_launcher",
        "the fleet starts the processes of its engines itself",
    ),
    "enable_elastic_ep": (bool, "the ranks of a replica are as many as it was started with"),
    "enable_fault_tolerance": (bool, "the fleet restarts lost replicas itself"),
    "mm_tensor_ipc": (lambda value: value == "torch_shm", "it serves a single engine only"),
}
"""By argument: which values are refused, and why."""


def uses_rust_front_end(args: argparse.Namespace) -> bool:
    """Whether this is a head with vLLM's Rust front end. A node has no front end, whatever the variable says."""
    return bool(envs.VLLM_USE_RUST_FRONTEND) and not getattr(args, "headless", False)


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raise ConfigError, with the flag and the reason, for a flag of vLLM that cannot be used with ours."""
    if uses_rust_front_end(args):
        _refuse_behind_rust(args)
    elif getattr(args, "grpc_port", None) is not None:
        raise ConfigError("argument --grpc-port: needs vLLM's Rust front end, VLLM_USE_RUST_FRONTEND=1, on a head")
    if getattr(args, "headless", False) and (getattr(args, "api_server_count", None) or 0) > 0:
        raise ConfigError("argument --api-server-count: not allowed with --headless: such a node has no API server")
    for name, (refused, reason) in _REFUSED.items():
        if refused(getattr(args, name, None)):
            raise ConfigError(f"argument --{name.replace('_', '-')}: not allowed with --omni-* flags: {reason}")
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"argument --node-rank: {args.node_rank} of --nnodes {args.nnodes}: ranks begin at 0")
    if args.nnodes > 1:
        _refuse_with_machines(args)
    local_ranks = getattr(args, "data_parallel_size_local", None)
    if local_ranks not in (None, args.data_parallel_size // args.nnodes or 1):
        raise ConfigError(
            f"argument --data-parallel-size-local: {local_ranks} of {args.data_parallel_size} ranks: not allowed with "
            "--omni-* flags: a node runs all ranks of a group, or with --nnodes an equal share of them; "
            "--omni-dp-size-local says how many groups it runs"
        )
    if envs.VLLM_DP_SIZE > 1:
        raise ConfigError("VLLM_DP_SIZE: not allowed with --omni-* flags: give --data-parallel-size")


def _refuse_with_machines(args: argparse.Namespace) -> None:
    """What cannot be used with a replica over several machines."""
    if not getattr(args, "headless", False):
        raise ConfigError(
            "argument --nnodes: not allowed on a head, whose own engines are on its machine: give the head "
            "--omni-dp-size-local 0, and start the replica with --headless on each of its machines"
        )
    try:
        host(args.master_addr)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"argument --master-addr: {error}") from error
    if not 1 <= args.master_port <= 65535:
        raise ConfigError(f"argument --master-port: {args.master_port} is not 1 to 65535")
    for name, refused, instead in (
        ("omni_pipeline", bool, "start a pipeline's replicas on one machine each"),
        ("omni_dp_size_local", lambda count: (count or 1) > 1, "start a process on each machine for each replica"),
        (
            "data_parallel_size",
            lambda ranks: ranks > 1 and ranks % args.nnodes,
            f"{args.data_parallel_size} ranks cannot be divided equally among {args.nnodes} machines",
        ),
        ("kv_transfer_config", _is_given, "its engine would have another id on each machine"),
        ("ec_transfer_config", _is_given, "its engine would have another id on each machine"),
        (
            "distributed_executor_backend",
            lambda name: name not in (None, "mp") and args.data_parallel_size == 1,
            "machines meet with 'mp' only",
        ),
    ):
        if refused(getattr(args, name, None)):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"argument {flag}: not allowed with --nnodes {args.nnodes}: {instead}")


def _refuse_behind_rust(args: argparse.Namespace) -> None:
    """Refuse what vLLM's Rust front end cannot do here, and a program that is not there."""
    if not RUST_FRONT_END.applies:
        raise ConfigError(
            "VLLM_USE_RUST_FRONTEND: with --omni-* flags it needs vLLM 0.33 or newer, and this is "
            f"{installed_version()}: upgrade, or unset it"
        )
    if (getattr(args, "api_server_count", None) or 1) > 1:
        raise ConfigError(
            "argument --api-server-count: not needed with VLLM_USE_RUST_FRONTEND: its one process uses all cores"
        )
    try:
        binary = envs.VLLM_RUST_FRONTEND_PATH
    except FileNotFoundError as error:
        raise ConfigError(f"VLLM_USE_RUST_FRONTEND: {error} Or unset it, for the Python front end.") from None
    if not os.access(binary, os.X_OK):
        raise ConfigError(f"VLLM_RUST_FRONTEND_PATH: {binary} cannot be executed: give the path of vllm-rs")


def prepare_engine_args(engine_args: Any, engines: int) -> None:
    """Set the number by which vLLM knows that this process runs several engines, in all stages.

    vLLM then does not cache processed multimodal inputs as if one engine had seen them all, and divides the cores of a
    CPU between the engines.
    """
    engine_args._api_process_count = max(engines, 2)
