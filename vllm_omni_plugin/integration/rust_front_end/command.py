"""The command line of vLLM's Rust front end, for vLLM 0.33 or newer."""

import argparse
import json
from typing import Any

from vllm import envs
from vllm.entrypoints.common.startup import jsonify_non_default_args

WAITS_FOR_EVER_S = 10**9
"""Seconds that a front end waits for its engine: a standby waits until it is needed."""
_ONE_ENGINE = ("--engine-start-index", "0", "--engine-count", "1", "--data-parallel-size", "1")
_NOT_ITS_OWN = {"api_server_count", "data_parallel_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb"}


def front_end_command(
    binary: str, args: argparse.Namespace, http: int, requests: int, outputs: int, *, grpc: int | None
) -> list[str]:
    """The command of a front end that serves one engine, as vLLM's `RustFrontendProcessManager` would start it.

    The numbers are descriptors: bound sockets of HTTP and gRPC, listening sockets of its ROUTER and its PULL.
    """
    settings: dict[str, Any] = jsonify_non_default_args(args, exclude=set(_NOT_ITS_OWN))
    settings["model_tag"] = getattr(args, "model_tag", None) or args.model
    settings["engine_ready_timeout_secs"] = WAITS_FOR_EVER_S
    settings["http_timeout_keep_alive"] = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    sockets = ("--listen-fd", http, "--input-listener-fd", requests, "--output-listener-fd", outputs)
    further = () if grpc is None else ("--grpc-listen-fd", grpc)
    own = ("--args-json", json.dumps(settings, sort_keys=True))
    return [binary, "frontend", *map(str, sockets), *_ONE_ENGINE, *map(str, further), *own]
