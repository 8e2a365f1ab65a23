"""Admission of requests over HTTP: whom they count for, how long they may wait, and refusals with a true status."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni_plugin.admin.hold import CLIENT_CLOSED_REQUEST, ReadAhead, error_response, is_post_to, refusal
from vllm_omni_plugin.admission.request_terms import Refusal, RequestTerms
from vllm_omni_plugin.errors import OmniError, RequestRefusedError

TIMEOUT_HEADER: Final = "X-Request-Timeout"
TENANT_HEADER: Final = "X-Tenant-ID"
FAIRNESS_HEADER: Final = "x-gateway-fairness-id"
"""What the inference gateways of Kubernetes call it."""

_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = "bearer"
_KEY_DIGITS: Final = 8

Headers = Mapping[bytes, bytes]
"""Of a request, by their names in lower case."""


class BadTimeoutError(OmniError, ValueError):
    """`X-Request-Timeout` is no time."""


@dataclass(frozen=True, slots=True)
class HttpAdmission:
    """What the middleware needs of a fleet.

    Attributes:
        expected_refusal: see `Admission.expected_refusal`.
        may_refuse: see `Admission.may_refuse`.
        count: told of each refusal that is answered before the application sees the request.
        tenant_headers: where a tenant's name may stand, first come first; empty: tenants are not told apart.
        clock: monotonic seconds.
    """

    expected_refusal: Callable[[RequestTerms, int | None, float], Refusal | None]
    may_refuse: Callable[[RequestTerms], bool]
    count: Callable[[Refusal], None]
    tenant_headers: Sequence[str]
    clock: Callable[[], float]

    def request_terms(self, headers: Headers) -> RequestTerms:
        """What a client says of its request.

        Raises:
            BadTimeoutError: of the time.
        """
        text = headers.get(_TIMEOUT)
        timeout_s = None if text is None else _seconds(text.decode("latin-1"))
        return RequestTerms(_tenant(headers, self.tenant_headers) if self.tenant_headers else "", timeout_s)


def tenant_headers(named: str | None, plan: str | None) -> tuple[str, ...]:
    """Where a tenant's name may stand; empty: nobody asked for tenants.

    Args:
        named: what `--omni-tenant-header` says.
        plan: what `--omni-admission` says.
    """
    if named is not None:
        return (named,)
    return (TENANT_HEADER, FAIRNESS_HEADER) if plan is not None else ()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise BadTimeoutError(f"{TIMEOUT_HEADER}: {text!r} is not a number of seconds above 0.")
    return value


def _tenant(headers: Headers, names: Sequence[str]) -> str:
    for name in names:
        if tenant := headers.get(name.lower().encode(), b"").decode("latin-1").strip():
            return tenant
    scheme, _, key = headers.get(_AUTHORIZATION, b"").decode("latin-1").partition(" ")
    if scheme.lower() == _BEARER and key:
        return f"key-{sha256(key.encode()).hexdigest()[:_KEY_DIGITS]}"
    return ""


class DeferredResponse:
    """An answer that is being made, by one request or several.

    Where a request may still be refused in the queue, what it begins with is kept back until one for it was handed
    to the fleet and something follows.

    Args:
        terms: of its requests.
        arrived: monotonic seconds at which its client began to wait.
        send: to the client.
        keeps: whether its beginning is kept back.

    Attributes:
        request_ids: the requests that were handed to the fleet for it.
        refused: what its client is told in its place: a request for it was refused, and nothing had been sent.
    """

    def __init__(self, terms: RequestTerms, arrived: float, send: Send, keeps: bool) -> None:
        self.request_ids: list[str] = []
        self.refused: RequestRefusedError | None = None
        self._terms = terms
        self._arrived = arrived
        self._send = send
        self._kept: list[Message] | None = [] if keeps else None

    def add_request(self, request_id: str, now: float) -> RequestTerms:
        """A request for it is handed to the fleet; returns its terms, with the time that is left."""
        self.request_ids.append(request_id)
        timeout_s = self._terms.timeout_s
        if timeout_s is None:
            return self._terms
        return RequestTerms(self._terms.tenant, max(0.0, timeout_s - (now - self._arrived)))

    def refuse(self, error: Exception | None) -> bool:
        """A request for it has ended with this error; returns whether the client will be told of a refusal instead."""
        if isinstance(error, RequestRefusedError) and self._kept is not None:
            self.refused = error
        return self.refused is not None

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application, or keep it."""
        return self._send(message) if self._kept is None else self._keep(self._kept, message)

    async def _keep(self, kept: list[Message], message: Message) -> None:
        kept.append(message)
        # Some streams say that they have begun before they ask for anything.
        follows = message["type"] != "http.response.start" and (self.request_ids or not message.get("more_body", False))
        if follows and self.refused is None:
            await self.release()

    async def release(self) -> None:
        """Send what is kept, and from now on all at once."""
        kept, self._kept = self._kept or (), None
        for message in kept:
            await self._send(message)


_response: ContextVar[DeferredResponse | None] = ContextVar("omni_response", default=None)


def current_response() -> DeferredResponse | None:
    """The answer over HTTP that this task works for, as those do that it starts; None outside of any."""
    return _response.get()


class AdmissionMiddleware:
    """Asks whether a request would be admitted before the application sees it, and answers refusals of both times.

    vLLM begins a stream before an engine has anything to say. The beginning is kept back until something follows, so
    that a request that is refused while it waits gets 429 or 503 and `Retry-After`, whatever it asked for. It acts on a
    POST to an inference path if `app.state.omni_admission` is there.

    Args:
        paths: the inference paths, below the root path.
    """

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission: HttpAdmission | None = (
            getattr(scope["app"].state, "omni_admission", None) if is_post_to(self._paths, scope) else None
        )
        if admission is None:
            await self._app(scope, receive, send)
            return
        now = admission.clock()
        try:
            terms = admission.request_terms(dict(scope["headers"]))
        except BadTimeoutError as fault:
            await error_response(str(fault), HTTPStatus.BAD_REQUEST, "BadRequestError")(scope, receive, send)
            return
        refused = admission.expected_refusal(terms, None, now)
        if refused is not None:
            ahead = ReadAhead(receive)
            body, receive = await ahead.body(), ahead.receive
            if body is None:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            if (priority := _priority(body)) is not None:
                refused = admission.expected_refusal(terms, priority, now)
        if refused is None:
            error = await self._answer(DeferredResponse(terms, now, send, admission.may_refuse(terms)), scope, receive)
        else:
            admission.count(refused)
            error = RequestRefusedError(*refused)
        if error is not None:
            await refusal(error)(scope, receive, send)

    async def _answer(self, answer: DeferredResponse, scope: Scope, receive: Receive) -> RequestRefusedError | None:
        """Let the application answer. Returns what the client is told instead, if anything."""
        token = _response.set(answer)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if answer.refused is None:
                raise
        finally:
            _response.reset(token)
            if answer.refused is None:
                await answer.release()
        return answer.refused


class _Body(msgspec.Struct):
    priority: int = 0


_decode: Final = msgspec.json.Decoder(_Body).decode


def _priority(body: bytes) -> int | None:
    """OpenAI's `priority` in a body; None if it cannot be read, which vLLM would say."""
    try:
        return _decode(body).priority
    except (msgspec.DecodeError, RecursionError):
        return None
