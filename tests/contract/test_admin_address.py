"""Where the operator's HTTP server of a head with vLLM's Rust front end listens, and which ports are refused."""

from argparse import Namespace

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.options.admin_address import admin_address, check_admin_port
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser


def serve(*arguments: str) -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    return args


@pytest.mark.parametrize(
    ("arguments", "options", "address"),
    [
        ((), OmniConfig(), ("127.0.0.1", 8001)),
        (("--host", "::", "--port", "9000"), OmniConfig(), ("127.0.0.1", 9001)),
        (("--port", "9000"), OmniConfig(admin_port=80), ("127.0.0.1", 80)),
        ((), OmniConfig(admin_key_file="keys"), ("0.0.0.0", 8001)),
        (("--host", "::"), OmniConfig(admin_key_file="keys"), ("::", 8001)),
    ],
)
def test_it_listens_on_loopback_unless_the_operator_gave_keys(
    arguments: tuple[str, ...], options: OmniConfig, address: tuple[str, int]
) -> None:
    assert admin_address(options, serve(*arguments)) == address


@pytest.mark.parametrize(
    ("rust", "arguments", "port", "reason"),
    [
        pytest.param("0", (), 9000, "needs vLLM's Rust front end", id="with the Python front end"),
        pytest.param("1", ("--port", "9000"), 9000, "9000 is the port of the OpenAI server", id="taken"),
        pytest.param("1", ("--port", "65535"), None, "no port after --port 65535", id="past the last port"),
    ],
)
def test_a_port_that_cannot_be_is_refused(
    rust: str, arguments: tuple[str, ...], port: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    with pytest.raises(ConfigError, match=f"--omni-admin-port: .*{reason}"):
        check_admin_port(OmniConfig(admin_port=port), serve(*arguments))


@pytest.mark.parametrize(
    ("rust", "arguments", "port"),
    [("0", ("--port", "65535"), None), ("1", (), None), ("1", ("--uds", "/tmp/socket", "--port", "9000"), 9000)],
)
def test_other_ports_are_accepted(
    rust: str, arguments: tuple[str, ...], port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    check_admin_port(OmniConfig(admin_port=port), serve(*arguments))
