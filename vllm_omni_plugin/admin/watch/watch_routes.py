"""HTTP routes to look at the fleet: its events, its state, and the page that shows them."""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from vllm_omni_plugin.admin.access import Access
from vllm_omni_plugin.admin.routes import app_state
from vllm_omni_plugin.admin.watch.event_stream import EventStreamResponse
from vllm_omni_plugin.admin.watch.fleet_broadcast import FleetBroadcast
from vllm_omni_plugin.admin.watch.server_sent import LAST_EVENT_ID, MEDIA_TYPE
from vllm_omni_plugin.orchestrator.event_log import FleetEvent

_PAGE = {
    "": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""The page and its parts, by their path below the prefix: file and media type."""
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
# A proxy that collects an answer before it passes it on would make a stream stand still.
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class EventReport:
    """The answer of `GET /omni/events`."""

    events: list[FleetEvent]


def build_watch_router(access: Access) -> APIRouter:
    """The routes under `/omni` that show the fleet. They ask the `omni_broadcast` (`FleetBroadcast`) of `app.state`.

    The page has nothing of the fleet in it, and is for everybody: its script asks the other routes, with the key that
    its user types in.

    Args:
        access: who may look.
    """
    router = APIRouter(prefix="/omni", tags=["fleet"])
    look = [Depends(access.require_read)]

    @router.get("/events", dependencies=look, response_model=EventReport)
    async def events(request: Request) -> Any:
        viewers: FleetBroadcast = app_state(request, "omni_broadcast")
        known = _known(request)
        if _wants_stream(request):
            return EventStreamResponse(viewers, viewers.event_stream(known), _STREAM_HEADERS)
        return EventReport(viewers.events(known))

    @router.get("/fleet", dependencies=look, response_model=None)
    async def fleet(request: Request) -> Any:
        viewers: FleetBroadcast = app_state(request, "omni_broadcast")
        if _wants_stream(request):
            return EventStreamResponse(viewers, viewers.fleet_stream(_known(request)), _STREAM_HEADERS)
        return viewers.state()

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


def _known(request: Request) -> str:
    """The last event that a client has, as it says."""
    return request.headers.get(LAST_EVENT_ID, "")
