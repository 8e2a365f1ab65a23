"""HTTP routes that show the fleet: its events, its state, and the page."""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from vllm_omni_plugin.admin.access import Access
from vllm_omni_plugin.admin.routes import app_state
from vllm_omni_plugin.admin.watch.event_stream import EventStreamResponse
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.server_sent import LAST_EVENT_ID, MEDIA_TYPE
from vllm_omni_plugin.orchestrator.event_log import FleetEvent

MAY_CHANGE = "X-Omni-May-Change"
"""Header of a stream with states: the page shows its buttons, since the viewer's key is one for changes."""
_PAGE = {
    "": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""File and media type by path below the prefix."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build_watch_router(access: Access) -> APIRouter:
    """The routes under `/omni` that show the fleet. They use `omni_broadcast` (`FleetBroadcast`) of `app.state`.

    The page itself contains no data of the fleet and needs no key. Its script requests the other routes with the key
    that the user enters.
    """
    router = APIRouter(prefix="/omni", tags=["fleet"])
    readers = [Depends(access.require_read)]

    @router.get("/events", dependencies=readers, response_model=dict[str, list[FleetEvent]])
    async def events(request: Request) -> Any:
        broadcast: FleetBroadcast = app_state(request, "omni_broadcast")
        last_id = _last_event_id(request)
        if _wants_stream(request):
            return EventStreamResponse(broadcast, broadcast.stream(last_id))
        return {"events": broadcast.events(last_id)}

    @router.get("/fleet", dependencies=readers, response_model=None)
    async def fleet(request: Request) -> Any:
        broadcast: FleetBroadcast = app_state(request, "omni_broadcast")
        if _wants_stream(request):
            # Only with a key: a browser's changes have the header `Origin`, so they count as local nowhere.
            may_change = {MAY_CHANGE: "1"} if access.has_admin_key(request.headers) else {}
            chunks = broadcast.stream(_last_event_id(request), with_state=True)
            return EventStreamResponse(broadcast, chunks, may_change)
        return broadcast.state()

    for path, (name, media_type) in _PAGE.items():
        _serve_file(router, path, name, media_type)
    return router


def _serve_file(router: APIRouter, path: str, name: str, media_type: str) -> None:
    content = files(__package__).joinpath(name).read_bytes()

    @router.get(path, include_in_schema=False)
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)


def _wants_stream(request: Request) -> bool:
    return MEDIA_TYPE in request.headers.get("accept", "")


def _last_event_id(request: Request) -> str:
    return request.headers.get(LAST_EVENT_ID, "")
