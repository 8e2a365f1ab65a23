"""HTTP routes for operators: replicas, draining the head, reloading the admission file, explaining a decision."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_omni_plugin.admin.access import Access
from vllm_omni_plugin.admin.explain import BadPromptError, DecisionReport, UnknownModelError
from vllm_omni_plugin.admin.hold import RETRY_AFTER_S
from vllm_omni_plugin.admin.operator_actions import Action, AdmissionFile, ReplicaReport, UnknownReplicaError
from vllm_omni_plugin.errors import (
    ConfigError,
    CoordinatorUnavailableError,
    NoExplanationError,
    NoReplicaError,
    OmniError,
    ReplicaError,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError


class ExplainRequest(BaseModel):
    """The body of `POST /omni/explain`. `prompt`: a text or token ids. `priority` None: the best one that the tenant's
    class allows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | list[int]
    session: str | None = None
    model: str | None = None
    tenant: str = ""
    priority: int | None = None


_STATUS: Mapping[HTTPStatus, tuple[type[OmniError], ...]] = {
    HTTPStatus.BAD_REQUEST: (BadPromptError, ConfigError),
    HTTPStatus.NOT_FOUND: (UnknownModelError, UnknownReplicaError),
    HTTPStatus.CONFLICT: (ReplicaError, NoExplanationError),
    HTTPStatus.SERVICE_UNAVAILABLE: (NoReplicaError, CoordinatorUnavailableError, QueueClosedError),
}


def build_router(access: Access) -> APIRouter:
    """The routes under `/omni`. They use `omni_fleet` (`FleetAdmin`), `omni_explain` (`explain`), `omni_drain`
    (`HeadDrain`) and `omni_admission_file` (`AdmissionFile`) of `app.state`.

    Errors are `HTTPException`s with the status of `_STATUS`; vLLM's server formats them like OpenAI's errors.
    `POST /omni/explain` requires write access, because scores show which prompts other clients have sent.
    """
    router = APIRouter(prefix="/omni", tags=["fleet"])
    admins = APIRouter(dependencies=[Depends(access.require_write)])

    @router.get("/replicas", dependencies=[Depends(access.require_read)])
    async def list_replicas(request: Request) -> dict[str, list[ReplicaReport]]:
        return {"replicas": app_state(request, "omni_fleet").replicas()}

    @admins.post("/replicas/{replica}/drain", status_code=HTTPStatus.NO_CONTENT)
    async def drain_replica(replica: str, request: Request) -> None:
        await _manage(request, replica, "drain")

    @admins.post("/replicas/{replica}/resume", status_code=HTTPStatus.NO_CONTENT)
    async def resume_replica(replica: str, request: Request) -> None:
        await _manage(request, replica, "resume")

    @admins.delete("/replicas/{replica}", status_code=HTTPStatus.NO_CONTENT)
    async def remove_replica(replica: str, request: Request) -> None:
        await _manage(request, replica, "remove")

    @admins.post("/drain", status_code=HTTPStatus.NO_CONTENT)
    async def drain_head(request: Request) -> None:
        app_state(request, "omni_drain").begin()

    @admins.post("/resume", status_code=HTTPStatus.NO_CONTENT)
    async def resume_head(request: Request) -> None:
        app_state(request, "omni_drain").end()

    @admins.post("/admission")
    async def reload_admission(request: Request) -> dict[str, list[str]]:
        file: AdmissionFile | None = getattr(request.app.state, "omni_admission_file", None)
        if file is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "This server was started without --omni-admission.")
        with _http_errors():
            return {"changes": await file.reload()}

    body = {"requestBody": {"content": {"application/json": {"schema": ExplainRequest.model_json_schema()}}}}

    @admins.post("/explain", openapi_extra=body)
    async def explain(request: Request) -> DecisionReport:
        # Not a parameter: FastAPI would read the body before the access check.
        question = _explain_request(await request.body())
        with _http_errors():
            explained: DecisionReport = await app_state(request, "omni_explain")(**question.model_dump())
        return explained

    router.include_router(admins)
    return router


def _explain_request(body: bytes) -> ExplainRequest:
    try:
        return ExplainRequest.model_validate_json(body)
    except ValidationError as error:
        faults = (": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"The body: {'; '.join(faults)}.") from error


def app_state(request: Request, name: str) -> Any:
    """An attribute of `app.state`. Raises an `HTTPException` with status 404 if the server has no fleet."""
    found = getattr(request.app.state, name, None)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, "This server has no fleet of replicas.")
    return found


async def _manage(request: Request, replica: str, action: Action) -> None:
    with _http_errors():
        await app_state(request, "omni_fleet").manage(replica, action)


@contextmanager
def _http_errors() -> Iterator[None]:
    """Turn our errors into their HTTP status; a 503 gets Retry-After."""
    try:
        yield
    except OmniError as error:
        for status, kinds in _STATUS.items():
            if isinstance(error, kinds):
                retry = {"Retry-After": str(RETRY_AFTER_S)} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
                raise HTTPException(status, str(error), retry) from error
        raise
