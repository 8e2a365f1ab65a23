"""Admission over HTTP: which tenant a request belongs to, its deadline, and refusals with a correct HTTP status."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.datastructures import Headers as RequestHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import (
    CLIENT_CLOSED_REQUEST,
    LONGEST_HOLD,
    BufferedRequest,
    error_response,
    is_request,
    refusal_response,
)
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.errors import OmniError, RequestRefusedError

TIMEOUT_HEADER: Final = "X-Request-Timeout"
TENANT_HEADER: Final = "X-Tenant-ID"
FAIRNESS_HEADER: Final = "x-gateway-fairness-id"
"""The tenant header of Kubernetes' inference gateways."""

_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = "bearer"
_KEY_DIGITS: Final = 8

Headers = Mapping[bytes, bytes]
"""A request's headers; names in lower case."""


class BadTimeoutError(OmniError, ValueError):
    """`X-Request-Timeout` is not a positive number."""


@dataclass(frozen=True, slots=True)
class HttpAdmission:
    """What the middleware needs of a fleet: three methods of `Admission`, and the rest.

    `count` gets each refusal before the application sees the request. Without `tenant_headers`, which are tried in this
    order, requests have no tenants.
    """

    expected_refusal: Callable[[RequestTerms, int | None, float], RequestRefusedError | None]
    may_refuse: Callable[[RequestTerms], bool]
    count: Callable[[RequestRefusedError], None]
    tenant_headers: Sequence[str]
    clock: Callable[[], float]
    longest_wait_s: Callable[[RequestTerms], float]


def request_terms(headers: Headers, tenant_headers: Sequence[str], has_key: bool = True) -> RequestTerms:
    """Tenant and timeout of a request; without a valid key it is anonymous. Raises `BadTimeoutError`."""
    text = headers.get(_TIMEOUT)
    timeout_s = None if text is None else _seconds(text.decode("latin-1"))
    if not has_key:
        return RequestTerms(timeout_s=timeout_s, anonymous=True)
    return RequestTerms(_tenant(headers, tenant_headers) if tenant_headers else "", timeout_s)


def tenant_headers(tenant_header: str | None, admission_file: str | None) -> tuple[str, ...]:
    """The headers that may name a tenant, from the flags `--omni-tenant-header` and `--omni-admission`."""
    if tenant_header is not None:
        return (tenant_header,)
    return (TENANT_HEADER, FAIRNESS_HEADER) if admission_file is not None else ()


def _seconds(text: str) -> float:
    """The client's deadline (`X-Request-Timeout`); 400 if it is no positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise BadTimeoutError(f"{TIMEOUT_HEADER}: {text!r} is not a number of seconds above 0.")
    return value


def _tenant(headers: Headers, names: Sequence[str]) -> str:
    """The first tenant header that is set; without one, the API key's hash; else the tenant without a name."""
    for name in names:
        if tenant := _text(headers.get(name.lower().encode(), b"")).strip():
            return tenant
    scheme, _, key = headers.get(_AUTHORIZATION, b"").decode("latin-1").partition(" ")
    if scheme.lower() == _BEARER and key:
        return f"key-{sha256(key.encode()).hexdigest()[:_KEY_DIGITS]}"
    return ""


def _text(header: bytes) -> str:
    """Most clients send UTF-8, though HTTP says Latin-1."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


class DeferredResponse:
    """A response whose start may wait, made by one or several requests to the fleet.

    If its requests may be refused while they wait (`deferred`), the start is buffered until a request was submitted and
    then something follows the start. Until then a `refusal` can still replace the response. `arrived` is in monotonic
    seconds.
    """

    def __init__(self, terms: RequestTerms, arrived: float, send: Send, deferred: bool) -> None:
        self.request_ids: list[str] = []
        self.refusal: RequestRefusedError | None = None
        self._terms = terms
        self._arrived = arrived
        self._send = send
        self._buffered: list[Message] | None = [] if deferred else None

    def add_request(self, request_id: str, now: float) -> RequestTerms:
        """Note a request submitted for this response; returns its terms. Later ones have as long as the first."""
        if not self.request_ids:
            self._terms = replace(self._terms, waited_s=now - self._arrived)
        self.request_ids.append(request_id)
        return self._terms

    def refuse(self, error: Exception | None) -> bool:
        """A request for this response has failed. Returns whether the client gets a refusal instead of the response."""
        if isinstance(error, RequestRefusedError) and self._buffered is not None:
            self.refusal = error
        return self.refusal is not None

    def send(self, message: Message) -> Awaitable[None]:
        return self._send(message) if self._buffered is None else self._buffer(self._buffered, message)

    async def _buffer(self, buffered: list[Message], message: Message) -> None:
        """Hold a stream back until its first output, so that a late refusal is still a 429 and not a broken 200."""
        buffered.append(message)
        # Some streams send their first events before they submit a request.
        is_output = message["type"] != "http.response.start" and (
            self.request_ids or not message.get("more_body", False)
        )
        if is_output and self.refusal is None:
            await self.release()

    async def release(self) -> None:
        buffered, self._buffered = self._buffered or (), None
        for message in buffered:
            await self._send(message)


_response: ContextVar[DeferredResponse | None] = ContextVar("omni_response", default=None)


def current_response() -> DeferredResponse | None:
    """The HTTP response that this task, or the task that started it, works for; None outside of HTTP requests."""
    return _response.get()


class AdmissionMiddleware:
    """Refuses requests before the application sees them, and turns later refusals into the correct status.

    vLLM starts a stream before an engine has any output. This middleware holds the start back, so that a request that
    is refused while it waits gets 429 or 503 with `Retry-After`, also for a stream. It handles POST requests to
    `paths`, below the root path, if `app.state.omni_admission` exists. vLLM does not check the keys of all paths, so a
    client for whom `has_key` is false counts for no tenant; it is true if the server needs no key.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str], has_key: Callable[[RequestHeaders], bool]) -> None:
        self._app = app
        self._paths = paths
        self._has_key = has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request that admission would refuse anyway, before vLLM reads it; 400 for a bad deadline."""
        admission: HttpAdmission | None = (
            getattr(scope["app"].state, "omni_admission", None) if is_request("POST", self._paths, scope) else None
        )
        if admission is None:
            await self._app(scope, receive, send)
            return
        now = admission.clock()
        try:
            has_key = self._has_key(RequestHeaders(scope=scope))
            # Of a header that is sent twice, the first counts, as in the check of the key.
            terms = request_terms(dict(reversed(scope["headers"])), admission.tenant_headers, has_key)
        except BadTimeoutError as error:
            await error_response(str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")(scope, receive, send)
            return
        refusal = admission.expected_refusal(terms, None, now)
        if refusal is not None:
            request = BufferedRequest(receive)
            body, receive = await request.body(), request.receive
            if body is None:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            if (priority := _priority(body)) is not None:
                refusal = admission.expected_refusal(terms, terms.allowed_priority(priority), now)
        if refusal is None:
            scope[LONGEST_HOLD] = admission.longest_wait_s(terms)
            response = DeferredResponse(terms, now, send, admission.may_refuse(terms))
            refusal = await self._respond(response, scope, receive)
        else:
            admission.count(refusal)
        if refusal is not None:
            await refusal_response(refusal)(scope, receive, send)

    async def _respond(self, response: DeferredResponse, scope: Scope, receive: Receive) -> RequestRefusedError | None:
        """Run the application. Returns the refusal that the client gets instead of the response, if any."""
        token = _response.set(response)
        try:
            await self._app(scope, receive, response.send)
        except Exception:
            if response.refusal is None:
                raise
        finally:
            _response.reset(token)
            if response.refusal is None:
                await response.release()
        return response.refusal


class _Body(msgspec.Struct):
    priority: int = 0


_decode: Final = msgspec.json.Decoder(_Body).decode


def _priority(body: bytes) -> int | None:
    """OpenAI's `priority` in a body; None if it cannot be decoded, which vLLM reports."""
    try:
        return _decode(body).priority
    except (msgspec.DecodeError, RecursionError):
        return None
