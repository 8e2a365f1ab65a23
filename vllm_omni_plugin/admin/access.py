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


@dataclass(frozen=True)
class Access:
    """Accepts requests to the operator's routes, or refuses them with an `HTTPException`.

    `has_api_key` is always true if the server has no API keys. Clients of a unix socket have no address.
    """

    has_api_key: KeyCheck
    has_admin_key: KeyCheck | None
    unix_socket: bool

    async def require_read(self, request: Request) -> None:
        """Require any valid key."""
        if self.has_api_key(request.headers) or (self.has_admin_key and self.has_admin_key(request.headers)):
            return
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED, "Unauthorized: these routes need the server's API key as a bearer token."
        )

    async def require_write(self, request: Request) -> None:
        """Require an admin key. Without admin keys, require a local request with an API key."""
        if self.has_admin_key is None:
            await self.require_read(request)
            if not self._is_local(request):
                allowed = "direct requests from loopback addresses, not through a proxy or from a web page"
                raise HTTPException(
                    HTTPStatus.FORBIDDEN, f"Forbidden: without {ADMIN_KEY_FLAG} the server accepts only {allowed}."
                )
        elif not self.has_admin_key(request.headers):
            needs = f"an admin key of the server ({ADMIN_KEY_FLAG}) as a bearer token"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, f"Unauthorized: this needs {needs}.")

    def _is_local(self, request: Request) -> bool:
        if any(name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES) for name in request.headers):
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
