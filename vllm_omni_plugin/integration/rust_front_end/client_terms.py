"""What clients say of their tenant and deadline: behind the Rust front end in `vllm_xargs`, since headers end there."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_plugin.admin.http_admission import TIMEOUT_HEADER, request_terms
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.vllm_api.engine_messages.request_building import take_extra_args


def terms_reader(tenant_headers: Sequence[str]) -> Callable[[Any], RequestTerms] | None:
    """Return a function that reads the terms of an `EngineCoreRequest`. It raises `BadTimeoutError`.

    It removes what it reads: an engine may not continue the work of another one on a request with custom arguments.
    These have the names of the headers. Without `tenant_headers` none is read: None.
    """
    if not tenant_headers:
        return None
    names = frozenset(name.lower() for name in (TIMEOUT_HEADER, *tenant_headers))

    def read(request: Any) -> RequestTerms:
        given = take_extra_args(request, names)
        headers = {name.encode(): str(value).encode() for name, value in given.items() if value is not None}
        return request_terms(headers, tenant_headers)

    return read
