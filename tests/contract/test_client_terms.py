"""Tenant and deadline of requests behind vLLM's Rust front end, from their custom arguments (`vllm_xargs`)."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_omni_plugin.admin.http_admission import BadTimeoutError, tenant_headers
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.integration.rust_front_end.client_terms import terms_reader
from vllm_omni_plugin.vllm_api.engine_messages.request_building import build_engine_core_request_from_tokens

READ = terms_reader(tenant_headers(None, "admission.yaml"))


def request(**extra_args: Any) -> Any:
    params = SamplingParams(extra_args=extra_args or None)
    return build_engine_core_request_from_tokens("r", {"prompt_token_ids": [1, 2]}, params)


@pytest.mark.parametrize(
    ("given", "terms"),
    [
        pytest.param({}, RequestTerms(), id="nothing"),
        pytest.param({"X-Tenant-ID": "acme"}, RequestTerms("acme"), id="a tenant"),
        pytest.param({"x-tenant-id": "acme"}, RequestTerms("acme"), id="in lower case"),
        pytest.param({"x-gateway-fairness-id": "acme"}, RequestTerms("acme"), id="of a gateway"),
        pytest.param({"x-gateway-fairness-id": "b", "X-Tenant-ID": "a"}, RequestTerms("a"), id="ours goes first"),
        pytest.param({"X-Tenant-ID": 7}, RequestTerms("7"), id="a number"),
        pytest.param({"X-Request-Timeout": 2.5}, RequestTerms(timeout_s=2.5), id="a deadline"),
        pytest.param({"Authorization": "Bearer key"}, RequestTerms(), id="no key"),
    ],
)
def test_terms_have_the_names_of_the_headers(given: dict[str, Any], terms: RequestTerms) -> None:
    assert READ(request(**given)) == terms


@pytest.mark.parametrize("timeout", [0, -1, "soon", "nan", [1]])
def test_a_bad_deadline_is_an_error(timeout: Any) -> None:
    with pytest.raises(BadTimeoutError, match="X-Request-Timeout"):
        READ(request(**{"X-Request-Timeout": timeout}))


def test_a_header_of_the_operators_choice_is_the_only_one() -> None:
    read = terms_reader(tenant_headers("X-Team", None))
    assert read(request(**{"X-Team": "a", "X-Tenant-ID": "b"})) == RequestTerms("a")


def test_without_admission_nothing_is_read() -> None:
    asked = request(**{"X-Tenant-ID": "acme", "X-Request-Timeout": "soon"})
    assert terms_reader(tenant_headers(None, None)) is None
    assert len(asked.sampling_params.extra_args) == 2


def test_engines_get_only_the_other_arguments() -> None:
    # With custom arguments a request could not continue on another engine.
    alone, beside = request(**{"X-Tenant-ID": "acme"}), request(**{"X-Tenant-ID": "acme", "mine": 1})
    shared = beside.sampling_params
    READ(alone), READ(beside)
    assert (alone.sampling_params.extra_args, beside.sampling_params.extra_args) == (None, {"mine": 1})
    assert shared.extra_args == {"X-Tenant-ID": "acme", "mine": 1}
