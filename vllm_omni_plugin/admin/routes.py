"""HTTP routes of the operator: see the replicas, drain one, take it back, or make it leave."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from vllm_omni_plugin.admin.fleet import Action, FleetAdmin, ReplicaReport, UnknownReplicaError
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The answer of `GET /omni/replicas`."""

    replicas: list[ReplicaReport]


def build_router(guard: Callable[[Request], Awaitable[None]]) -> APIRouter:
    """The routes under `/omni`. They answer for `app.state.omni_fleet`, a `FleetAdmin`.

    Errors are `HTTPException`s, which vLLM's server answers in the shape of OpenAI's errors: 404 for an unknown id,
    409 for a replica in the wrong state, 503 while the server ends.

    Args:
        guard: lets a request pass, or raises an `HTTPException`; called for every route.
    """
    router = APIRouter(prefix="/omni/replicas", tags=["fleet"], dependencies=[Depends(guard)])

    @router.get("")
    async def list_replicas(request: Request) -> FleetReport:
        return FleetReport(_fleet(request).replicas())

    @router.post("/{replica}/drain", status_code=HTTPStatus.NO_CONTENT)
    async def drain_replica(replica: str, request: Request) -> Response:
        return await _manage(request, replica, "drain")

    @router.post("/{replica}/resume", status_code=HTTPStatus.NO_CONTENT)
    async def resume_replica(replica: str, request: Request) -> Response:
        return await _manage(request, replica, "resume")

    @router.delete("/{replica}", status_code=HTTPStatus.NO_CONTENT)
    async def remove_replica(replica: str, request: Request) -> Response:
        return await _manage(request, replica, "remove")

    return router


def _fleet(request: Request) -> FleetAdmin:
    fleet: FleetAdmin | None = getattr(request.app.state, "omni_fleet", None)
    if fleet is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, "This server has no fleet of replicas.")
    return fleet


async def _manage(request: Request, replica: str, action: Action) -> Response:
    try:
        await _fleet(request).manage(replica, action)
    except UnknownReplicaError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, str(error)) from error
    except ReplicaError as error:
        raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error
    except HandoverClosedError as error:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    return Response(status_code=HTTPStatus.NO_CONTENT)
