"""vLLM's spans of requests have the replica and the decision."""

import time
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats

from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.integration.core_client.request_tracing import RequestSpans
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas, RequestStages, StageTimes

from .stage_models import source

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
TRACE_HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"}
MATCH = Decision(1, "match", fallback="no-events", matched_tokens=32)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class Traced:
    """AsyncLLM's `OutputProcessor` with tracing, and its finished spans."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        exporter.clear()
        self.processor = OutputProcessor(None, log_stats=True, tracing_enabled=True)
        self._exporter = exporter

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def add(self, request_id: str) -> None:
        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request = source(params=params, request_id=request_id, external_req_id="client's")
        queue = RequestOutputCollector(params.output_kind, request_id)
        self.processor.add_request(request, None, None, 0, queue)

    def finish(self, *request_ids: str) -> None:
        outputs = [
            EngineCoreOutput(request_id, [7], finish_reason=FinishReason.STOP, trace_headers=TRACE_HEADERS)
            for request_id in request_ids
        ]
        self.processor.process_outputs(outputs, time.monotonic(), IterationStats())


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Traced:
    return Traced(exporter)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith("omni.")}


LEAST = Decision(0, "least-load")


@pytest.mark.parametrize(
    ("policies", "chosen_replicas", "expected"),
    [
        (["kv-aware"], [("0.0", LEAST), ("0.1", MATCH)], ("0.1", "kv-aware", "match", "no-events", 32)),
        (
            ["prefix", "session"],
            [("0.0", MATCH), ("1.0", LEAST), ("0.1", MATCH), ("1.3", MATCH)],
            ("0.1, 1.3", "prefix, session", "match, match", "no-events, no-events", 64),
        ),
    ],
    ids=["one stage", "a pipeline"],
)
def test_the_span_of_a_request_has_the_last_send_in_each_stage(
    traced: Traced, policies: list[str], chosen_replicas: ChosenReplicas, expected: tuple[Any, ...]
) -> None:
    spans = RequestSpans(traced.processor, policies)
    traced.add("a")
    list_to_fill = spans.expect("a", None)
    list_to_fill += chosen_replicas
    traced.finish("a")
    (span,) = traced.spans
    names = ("omni.replica", "omni.policy", "omni.reason", "omni.fallback", "omni.matched_tokens")
    assert attributes(span) == dict(zip(names, expected, strict=True))
    assert (span.name, (span.attributes or {})["gen_ai.request.id"]) == ("llm_request", "client's")
    assert span.context is not None
    assert span.context.trace_id == TRACE_ID


def test_each_sample_of_a_request_has_its_own_attributes(traced: Traced) -> None:
    spans = RequestSpans(traced.processor, ["p"])
    for request_id, replica in (("0_a", "0.0"), ("1_a", "0.1")):
        traced.add(request_id)
        spans.expect(request_id, [(replica, MATCH)])
    traced.finish("1_a", "0_a")
    assert [attributes(span)["omni.replica"] for span in traced.spans] == ["0.1", "0.0"]


def test_a_later_chunk_of_a_session_keeps_the_first_send(traced: Traced) -> None:
    spans = RequestSpans(traced.processor, ["p"])
    traced.add("a")
    spans.expect("a", [("0.1", MATCH)])
    spans.expect("a", [])
    traced.finish("a")
    (span,) = traced.spans
    assert attributes(span)["omni.replica"] == "0.1"


@pytest.mark.parametrize("chosen_replicas", [None, []], ids=["unknown", "not sent"])
def test_a_request_without_a_send_has_a_plain_span(traced: Traced, chosen_replicas: ChosenReplicas | None) -> None:
    spans = RequestSpans(traced.processor, ["p"])
    traced.add("a")
    if chosen_replicas is not None:
        spans.expect("a", chosen_replicas)
    spans.expect("gone", None)
    traced.finish("a")
    (span,) = traced.spans
    assert attributes(span) == {}
    assert (span.attributes or {})["gen_ai.usage.prompt_tokens"] == 3


STAGES = RequestStages(
    "a",
    (
        StageTimes(0, "thinker", 10.0, 11.0, {"queue": 0.25, "run": 0.5}),
        StageTimes(1, "vocoder", 10.5, 12.0, {"transfer": 0.125}),
    ),
)


def stage_spans(spans: tuple[ReadableSpan, ...]) -> list[tuple[Any, ...]]:
    """Return name, parent and our attributes of each span of a stage, and check their lengths."""
    spans = tuple(span for span in spans if span.name == "omni.stage")
    lengths = [round((span.end_time - span.start_time) / 1e9, 3) for span in spans if span.end_time and span.start_time]
    assert lengths == [1.0, 1.5][: len(spans)]
    return [(span.parent and span.parent.span_id, attributes(span)) for span in spans]


@pytest.mark.parametrize("order", ["answer first", "stages first"])
def test_each_stage_has_a_span_below_that_of_its_request_whichever_ends_first(traced: Traced, order: str) -> None:
    spans = RequestSpans(traced.processor, ["prefix", "prefix"])
    traced.add("a")
    spans.expect("a", None)
    if order == "answer first":
        traced.finish("a")
        spans.stages_ended(STAGES)
    else:
        spans.stages_ended(STAGES)
        traced.finish("a")
    (request,) = [span for span in traced.spans if span.name == "llm_request"]
    context = request.get_span_context()
    assert context is not None
    assert context.trace_id == TRACE_ID
    assert stage_spans(traced.spans) == [
        (
            context.span_id,
            {"omni.stage": "thinker", "omni.stage_id": 0, "omni.queue_seconds": 0.25, "omni.run_seconds": 0.5},
        ),
        (context.span_id, {"omni.stage": "vocoder", "omni.stage_id": 1, "omni.transfer_seconds": 0.125}),
    ]
