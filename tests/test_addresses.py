"""Names of head and nodes: both ends take the same address of a name that has several."""

import argparse
import socket
from typing import Any

import pytest

from vllm_omni_plugin.config import OmniConfig, host
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.options.flag_rules import check
from vllm_omni_plugin.integration.options.listening import (
    bind_address,
    check_exposure,
    coordinator_address,
    engines_address,
    log_join_command,
    resolve,
    warn_if_insecure,
)


@pytest.mark.parametrize("name", ["a..b", ".a", f"{'a' * 64}.example", "ä" * 60])
def test_a_name_that_python_cannot_look_up_is_refused_as_one_of_no_host(name: str) -> None:
    with pytest.raises(UnicodeError):
        socket.getaddrinfo(name, None)
    with pytest.raises(argparse.ArgumentTypeError, match="neither an address nor the name of a host"):
        host(name)


V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    known: dict[str, list[Any]] = {}

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known[host]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def options(address: str, **other: Any) -> OmniConfig:
    return OmniConfig(master_address=address, master_port=7000, **other)


def test_a_name_that_python_cannot_look_up_is_an_error_of_vllms_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"--master-addr: 'a\.\.b' is not an address and not a known name: .*too long"
    ):
        resolve("a..b", "--master-addr")


@pytest.mark.parametrize(
    ("found", "bound", "coordinator"),
    [
        pytest.param([V4], "127.0.0.1", "tcp://head:7000", id="IPv4"),
        pytest.param([V6, V4], "127.0.0.1", "tcp://head:7000", id="both"),
        pytest.param([V6], "::1", "tcp://[::1]:7000", id="IPv6"),
    ],
)
def test_head_binds_the_address_that_nodes_connect_to(
    names: dict[str, list[Any]], found: list[Any], bound: str, coordinator: str
) -> None:
    names["head"] = found
    assert bind_address(options("head"), headless=False) == bound
    assert coordinator_address(options("head")) == coordinator


def test_address_in_brackets_is_one(names: dict[str, list[Any]]) -> None:
    names["::1"] = [V6]
    assert bind_address(options("[::1]"), headless=False) == "::1"
    assert coordinator_address(options("[::1]")) == "tcp://[::1]:7000"


def test_node_is_reached_at_the_address_of_its_name(names: dict[str, list[Any]]) -> None:
    names["node"] = [V6, V4]
    assert bind_address(options("head", replica_address="node"), headless=True) == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"address": "head"}, "10.0.0.1", id="master"),
        pytest.param({"address": "0.0.0.0"}, "10.0.0.7", id="every address"),
        pytest.param({"address": "0.0.0.0", "replica_address": "head"}, "10.0.0.1", id="given"),
    ],
)
def test_engines_of_a_head_are_reached_where_it_is(
    given: dict[str, str], expected: str, names: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, address in (("head", "10.0.0.1"), ("0.0.0.0", "0.0.0.0")):
        names[name] = [(*V4[:-1], (address, 0))]
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: "10.0.0.7")
    assert engines_address(options(**given)) == expected


@pytest.mark.parametrize(
    ("given", "bound", "told"),
    [
        pytest.param("10.0.0.1", "10.0.0.1", "10.0.0.1", id="one address"),
        pytest.param("head.cluster", "10.0.0.1", "head.cluster", id="name"),
        pytest.param("0.0.0.0", "0.0.0.0", "<an address of this machine>", id="every address"),
    ],
)
def test_the_log_says_how_to_join(caplog: pytest.LogCaptureFixture, given: str, bound: str, told: str) -> None:
    caplog.set_level("INFO")
    log_join_command(options(given), bound)
    where = f"--omni-master-address {told} --omni-master-port 7000"
    assert caplog.messages == [f"Replicas join with: --headless {where}; another head with: --omni-join {where}"]


@pytest.mark.parametrize("insecure", [True, False])
def test_the_log_warns_of_what_was_accepted(caplog: pytest.LogCaptureFixture, insecure: bool) -> None:
    warn_if_insecure(options("10.0.0.1", insecure=insecure), "10.0.0.1")
    assert ["everybody who reaches 10.0.0.1" in message for message in caplog.messages] == [True] * insecure


@pytest.mark.parametrize(
    ("headless", "replica_address", "blamed"),
    [
        (False, None, "argument --omni-master-address: 10.0.0.2 can be reached"),
        (True, None, "argument --omni-master-address: this node's address on the way to the head (10.0.0.2) can be"),
        (True, "10.0.0.2", "argument --omni-replica-address: 10.0.0.2 can be reached"),
    ],
)
def test_an_address_without_a_secret_blames_a_flag_that_was_given(
    headless: bool, replica_address: str | None, blamed: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_exposure(options("10.0.0.1", replica_address=replica_address), "10.0.0.2", headless)
    assert str(refused.value).startswith(blamed)


def test_a_second_head_without_join_is_told_of_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        second = OmniConfig(master_address="127.0.0.1", master_port=first.getsockname()[1])
        with pytest.raises(ConfigError, match=r"Address already in use; if another head has it, .* --omni-join"):
            check(second, ("master_address", "master_port"), headless=False)
