"""Access control of the routes under `/omni`."""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

from fastapi import HTTPException, Request
from starlette.datastructures import Headers

from vllm_omni_plugin.config import ADMIN_KEY_FLAG

KeyCheck = Callable[[Headers], bool]
"""Whether the headers contain a valid key."""

_FORWARDED = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "origin")
_FORWARDED_PREFIXES = ("x-forwarded-", "x-envoy-")
"""Headers of a proxy, and of a browser for a request of a web page. Such a request does not count as local. This also
excludes an address that uvicorn took from a header instead of the connection."""


_REMEDY = (
    "A head without --uds keeps one for commands of its own user on its machine: vllm-omni-plugin finds it there, and "
    f"`vllm-omni-plugin admin-key` prints it. To have others, start the head with {ADMIN_KEY_FLAG}."
)


@dataclass(frozen=True)
class Access:
    """Accepts requests to the operator's routes, or refuses them with an `HTTPException`.

    Attributes:
        has_api_key: always true if the server has no API keys.
        has_admin_key: whether it is one of the operator's keys, or this server's own, see `publish_local_key`.
        has_key_file: whether the operator gave keys; then nothing else allows a change.
        unix_socket: the server listens on a unix socket, whose clients have no address.
        loopback: clients with a loopback address, or of the unix socket, may change the fleet. A forwarder on this
            machine is one of them, and need not add a header.
    """

    has_api_key: KeyCheck
    has_admin_key: KeyCheck
    has_key_file: bool = False
    unix_socket: bool = False
    loopback: bool = False

    async def require_read(self, request: Request) -> None:
        """Require any valid key."""
        if self.has_api_key(request.headers) or self.has_admin_key(request.headers):
            return
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED, "Unauthorized: give the server's API key, or an admin key, as a bearer token."
        )

    async def require_write(self, request: Request) -> None:
        """Require an admin key. Without a key file, an API key is enough for a request that counts as local."""
        if self.has_admin_key(request.headers):
            return
        if self.has_key_file:
            needs = f"an admin key of the server ({ADMIN_KEY_FLAG}) as a bearer token"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, f"Unauthorized: this needs {needs}.")
        await self.require_read(request)
        if not self._is_local(request):
            raise HTTPException(
                HTTPStatus.FORBIDDEN, f"Forbidden: this needs an admin key as a bearer token. {_REMEDY}"
            )

    def _is_local(self, request: Request) -> bool:
        """Whether the request comes from this machine itself: through no proxy, over loopback or a unix socket."""
        forwarded = any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES) for name in request.headers)
        if forwarded or not self.loopback:
            return False
        if request.client is None:
            # A TCP peer that disconnected before its address could be read is unknown.
            return self.unix_socket
        try:
            address = ip_address(request.client.host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            # An IPv4 peer of an IPv6 socket.
            return address.ipv4_mapped.is_loopback
        return address.is_loopback
