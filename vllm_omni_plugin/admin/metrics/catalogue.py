"""All metrics of this package: names, types, labels and help texts. docs/metrics.md is generated from it."""

from functools import partial
from typing import Literal, NamedTuple

from vllm_omni_plugin.orchestrator.requests.counters import HISTOGRAMS

PREFIX = "vllm_omni_fleet:"
MultiprocessMode = Literal["livesum", "livemostrecent", "livemax", "livemin"]


class MetricDefinition(NamedTuple):
    """One metric.

    Attributes:
        name: without the prefix, and without `_total` for a counter.
        meaning: the help text, with the unit.
        multiprocess_mode: how prometheus_client joins a gauge of several API servers: `livesum` if each server counts
            its own part, another mode if all servers see the same value.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    multiprocess_mode: MultiprocessMode = "livesum"

    @property
    def sample(self) -> str:
        """The name in a query; for a histogram without `_bucket`, `_sum` or `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _metric(kind: str, sample: str, meaning: str, mode: MultiprocessMode = "livesum") -> MetricDefinition:
    """A metric by its sample, written as in a scrape: `name{label,label}`."""
    name, _, labels = sample.rstrip("}").partition("{")
    return MetricDefinition(name, kind, tuple(labels.split(",")) if labels else (), meaning, mode)


_gauge, _counter = partial(_metric, "gauge"), partial(_metric, "counter")

METRICS = (
    _gauge(
        "replicas{stage,state}",
        "Replicas by state (`up`, `draining`, `down`, `error`, `other-generation`); take the maximum over the "
        "heads of a generation.",
        "livemostrecent",
    ),
    _gauge(
        "replica_info{stage,replica,engine}",
        "1 for each attached replica, 0 for others; `engine` is its number in `vllm:` metrics.",
        "livemax",
    ),
    _gauge(
        "requests_waiting{stage}",
        "This head's requests that no engine works on: held by the head (`requests_held`), or sent and not reported "
        "as begun.",
    ),
    _gauge("requests_running{stage}", "This head's requests that an engine works on."),
    _gauge(
        "expected_wait_seconds{stage}",
        "Seconds until an engine would begin a new request. Missing before a first output.",
        "livemax",
    ),
    _gauge("requests_queued{class}", "This head's requests in the wait queue; a part of `requests_waiting`."),
    _gauge(
        "class_expected_wait_seconds{class}",
        "Seconds until an engine would begin a new request at the end of its class's queue.",
        "livemax",
    ),
    _counter(
        "requests_refused{stage,reason,status}",
        "Requests refused on arrival or while they waited. `in_flight`, `token_rate`: a limit of the tenant; "
        "`queue_full`, `pushed_out`: others had precedence; `deadline`: too late.",
    ),
    _counter("idle_while_waiting", "Times a replica had begun all its requests while requests waited at the head."),
    _gauge(
        "tenant_requests_waiting{tenant}",
        "Requests that wait at this head, by tenants of the admission file; `other`: all others.",
    ),
    _gauge("tenant_requests_in_flight{tenant}", "Requests of these tenants that wait or run."),
    _counter("tenant_tokens{tenant}", "Prompt and answer tokens of ended requests."),
    _gauge(
        "tenant_weight{tenant}",
        "Weight of these tenants; while all wait, `tenant_tokens` grows in proportion.",
        "livemax",
    ),
    _gauge(
        "stage_kv_cache_usage_ratio{stage}",
        "Share of a stage's KV memory in use, 0 to 1; with several heads or API servers a lower bound.",
        "livemax",
    ),
    _gauge(
        "prefix_cache_hit_ratio{stage}",
        "Share of prompt tokens of this head's requests found in prefix caches, 0 to 1, over some 30 s.",
        "livemostrecent",
    ),
    _counter("assignments{stage,replica}", "Requests assigned to a replica."),
    _counter("dispatches{stage,replica}", "Old name of `assignments_total`, for this version only."),
    _counter(
        "adapter_loads{stage,replica}",
        "Requests assigned to a replica that probably had to load their LoRA adapter.",
    ),
    _gauge(
        "requests_in_flight{stage,replica}",
        "This head's requests charged to a replica; exact. May be summed over heads.",
    ),
    _gauge(
        "prefill_tokens{stage,replica}", "Prompt tokens of this head's requests that the replica must still compute."
    ),
    _gauge(
        "decode_tokens{stage,replica}",
        "Prompt and answer tokens of this head's requests there that have had a first output.",
    ),
    _gauge(
        "kv_cache_usage_ratio{stage,replica}",
        "Share of a replica's KV memory in use, 0 to 1, as its engine last reported; 0 without a request of this head.",
        "livemax",
    ),
    _counter(
        "replica_restarts{stage,replica}",
        "Restarts of an engine of a head with one API server; 0 for all other replicas.",
    ),
    _counter(
        "replica_stalls{stage,replica}",
        "Times that this head took a replica out because it computed nothing for `--omni-stall-timeout`.",
    ),
    _counter("decisions{stage,policy,reason}", "Requests assigned to a replica, by the reason of the decision."),
    _counter(
        "decision_fallbacks{stage,policy,fallback}",
        "Requests assigned although the policy could not apply its full rule, by cause; `policy-fault`: it failed.",
    ),
    _counter(
        "matched_tokens", "Prompt tokens expected in the cache, for requests whose engine reported cached tokens."
    ),
    _counter("cached_tokens", "Prompt tokens that engines reported as cached, for the same requests."),
    _gauge(
        "requests_held{where}",
        "Requests that wait: because no replica serves, `http` before they are accepted, `fleet` after; `move`: "
        "their replica is lost; `paused`: engines are paused.",
    ),
    _counter(
        "request_moves{way}", "Requests moved because their replica was lost, by `restart`, `resume` or `replay`."
    ),
    _counter("tokens_swallowed", "Tokens that replays repeated and that were dropped."),
    _counter("replays_diverged", "Replays that did not repeat the delivered tokens."),
    _counter(
        "requests_failed{reason}",
        "Requests that ended with an error of the fleet: `replica_lost`, `no_replica`, `query_of_death`.",
    ),
    _gauge(
        "coordinator_connected",
        "1 while the coordinator answers this head, else 0; missing in a fleet that nobody can join.",
        "livemin",
    ),
    _gauge(
        "heads",
        "Heads of this generation in contact with this one, and itself; each API server counts. Missing in a fleet "
        "that nobody can join.",
        "livemin",
    ),
    *(MetricDefinition(name, "histogram", labels, meaning) for name, (labels, meaning) in HISTOGRAMS.items()),
)
"""In the order of the page."""

BY_NAME = {metric.name: metric for metric in METRICS}
