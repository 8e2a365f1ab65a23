"""Who may look at the fleet over HTTP, and who may change it."""

from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

from fastapi import HTTPException, Request
from starlette.datastructures import Headers

from vllm_omni_plugin.config import ADMIN_KEY_FLAG

KeyCheck = Callable[[Headers], bool]
"""Whether headers have a valid key of one kind."""

_OF_SOMEBODY_ELSE = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "origin")
_OF_PROXIES = ("x-forwarded-", "x-envoy-")
"""Headers, and beginnings of some, by which a proxy says that it passes a request on, and a browser that a page does.
Such a request is nobody's on this machine. They also keep out an address that uvicorn has taken from a header instead
of the connection."""


class Access:
    """Lets requests to the operator's routes pass, or refuses them with an `HTTPException`.

    Args:
        has_api_key: of the server's API keys; true of all headers where it has none.
        has_admin_key: of the admin keys; None if there are none.
        unix_socket: whether the server listens on a unix socket, whose clients have no address.
    """

    def __init__(self, has_api_key: KeyCheck, has_admin_key: KeyCheck | None, unix_socket: bool) -> None:
        self._has_api_key = has_api_key
        self._has_admin_key = has_admin_key
        self._unix_socket = unix_socket

    async def require_read(self, request: Request) -> None:
        """Any valid key will do."""
        if self._has_api_key(request.headers) or (self._has_admin_key and self._has_admin_key(request.headers)):
            return
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED, "Unauthorized: these routes need the server's API key as a bearer token."
        )

    async def require_write(self, request: Request) -> None:
        """An admin key, or, where there are none, a request of this machine that may look."""
        if self._has_admin_key is None:
            await self.require_read(request)
            if not self._is_local(request):
                whom = "loopback addresses of its machine only, not through a proxy or from a web page"
                why = f"without {ADMIN_KEY_FLAG} the server answers this to {whom}"
                raise HTTPException(HTTPStatus.FORBIDDEN, f"Forbidden: {why}.")
        elif not self._has_admin_key(request.headers):
            needs = f"an admin key of the server ({ADMIN_KEY_FLAG}) as a bearer token"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, f"Unauthorized: this needs {needs}.")

    def _is_local(self, request: Request) -> bool:
        if any(name in _OF_SOMEBODY_ELSE or name.startswith(_OF_PROXIES) for name in request.headers):
            return False
        if request.client is None:
            # Of TCP, a peer that was gone before its address could be read: it may have been anybody.
            return self._unix_socket
        try:
            address = ip_address(request.client.host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            # A peer of IPv4 on a socket of IPv6.
            return address.ipv4_mapped.is_loopback
        return address.is_loopback
