"""Where the operator's HTTP server of a head with vLLM's Rust front end listens."""

import argparse

from vllm import envs

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError

_MAX_PORT = 65535
_LOOPBACK = "127.0.0.1"


def admin_address(options: OmniConfig, args: argparse.Namespace) -> tuple[str, int]:
    """The address and port: loopback, unless the operator gave keys."""
    host = args.host or "0.0.0.0" if options.admin_key_file is not None else _LOOPBACK
    return host, args.port + 1 if options.admin_port is None else options.admin_port


def check_admin_port(options: OmniConfig, args: argparse.Namespace) -> None:
    """Raise ConfigError if the port is given without the Rust front end, or is one of the front end's own."""
    if not envs.VLLM_USE_RUST_FRONTEND:
        if options.admin_port is not None:
            raise ConfigError(
                "argument --omni-admin-port: needs vLLM's Rust front end (VLLM_USE_RUST_FRONTEND=1): without it the "
                "routes under /omni, /metrics and /health are on the head's own port"
            )
        return
    _, port = admin_address(options, args)
    if port > _MAX_PORT:
        raise ConfigError(f"argument --omni-admin-port: needed, because there is no port after --port {args.port}")
    if port == args.port and not args.uds:
        raise ConfigError(f"argument --omni-admin-port: {port} is the port of the OpenAI server (--port)")
    if port == args.grpc_port:
        raise ConfigError(f"argument --omni-admin-port: {port} is the port of gRPC (--grpc-port); give another one")
