"""Access to the operator's routes, by keys, by the peer's address, and by headers of a proxy or a browser."""

import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.admin.asgi import CHANGES, app_of, client_of, served
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.admin_keys import read_admin_keys
from vllm_omni_plugin.errors import ConfigError

DRAIN = "/omni/replicas/0.0/drain"
keyless = partial(app_of, has_admin_key=False)
"""A server without a key file, and clients that do not know its own key."""
loopback = partial(keyless, loopback=True)
"""With `--omni-admin-loopback`."""
HERE = ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")
ELSEWHERE = ("10.0.0.9", "0.0.0.0", "::ffff:10.0.0.9", "fe80::1%eth0", "2001:db8::1", "localhost", "testclient", None)


@pytest.mark.parametrize("address", HERE)
async def test_a_loopback_peer_may_change_the_fleet_where_that_is_allowed(fleet: FakeFleet, address: str) -> None:
    async with client_of(loopback(fleet), address) as client:
        assert (await client.post(DRAIN)).status_code == 204


@pytest.mark.parametrize(
    ("server", "address"), [*((keyless, address) for address in HERE), *((loopback, other) for other in ELSEWHERE)]
)
async def test_all_other_peers_may_not_and_are_told_of_the_remedies(
    fleet: FakeFleet, server: Callable[[FakeFleet], FastAPI], address: str | None
) -> None:
    async with client_of(server(fleet), address) as client:
        for method, path in CHANGES:
            refused = await client.request(method, path)
            assert refused.status_code == 403
            assert "--omni-admin-key-file" in refused.json()["detail"]
        assert (await client.get("/omni/replicas")).json()["replicas"][0]["status"] == "up"
    assert ("vllm-omni-plugin admin-key" in refused.json()["detail"]) or server is loopback


FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Port", "X-Envoy-External-Address", "CF-Connecting-IP")


@pytest.mark.parametrize("header", [*FORWARDED, "Origin"])
async def test_requests_of_a_proxy_or_a_web_page_do_not_count_as_local(fleet: FakeFleet, header: str) -> None:
    async with client_of(loopback(fleet), "127.0.0.1") as client:
        answer = await client.post(DRAIN, headers={header: "127.0.0.1"})
    assert answer.status_code == 403
    assert "--omni-admin-key-file" in answer.json()["detail"]


async def test_the_body_is_not_read_before_the_access_check(fleet: FakeFleet) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        raise AssertionError

    async with client_of(keyless(fleet), "10.0.0.9") as client:
        assert (await client.post("/omni/explain", content=endless())).status_code == 403


async def test_an_address_that_uvicorn_takes_from_a_header_does_not_count(fleet: FakeFleet) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        served(loopback(fleet), listener, forwarded_allow_ips="*"),
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        assert (await client.post(DRAIN)).status_code == 204
        for claimed in ("127.0.0.1", "10.0.0.9, 127.0.0.1"):
            assert (await client.post(DRAIN, headers={"X-Forwarded-For": claimed})).status_code == 403


@pytest.mark.parametrize("server", [keyless, loopback])
async def test_peers_of_a_unix_socket_are_local_only_where_loopback_peers_are(
    fleet: FakeFleet, tmp_path: Path, server: Callable[..., FastAPI]
) -> None:
    """The peer may be a proxy that adds no header, as nginx and HAProxy add none by default."""
    listener = socket.socket(socket.AF_UNIX)
    path = str(tmp_path / "http")
    listener.bind(path)
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with (
        served(server(fleet, unix_socket=True), listener),
        httpx.AsyncClient(transport=transport, base_url="http://head") as client,
    ):
        assert (await client.post(DRAIN)).status_code == (204 if server is loopback else 403)
        assert (await client.post(DRAIN, headers={"X-Forwarded-For": "127.0.0.1"})).status_code == 403


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it has no key"),
        (b"\n \n", "it has no key"),
        (b"0123456789abcdef\nshort\n", "key 2 must have 16 or more characters and no spaces"),
        (b"0123456789 abcdef\n", "key 1 must have 16 or more"),
        (b"0123456789\x00abcdef\n", "key 1 must have 16 or more"),
        ("0123456789äbcdef\n".encode(), "key 1 is not ASCII"),
    ],
)
def test_an_unusable_key_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=fault) as raised:
        read_admin_keys(str(path), "--flag")
    assert str(raised.value).startswith(f"argument --flag: {path}: ")
