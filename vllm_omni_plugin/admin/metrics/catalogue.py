"""All metrics of this package: names, types, labels and help texts. docs/metrics.md is generated from it."""

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
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    multiprocess_mode: MultiprocessMode = "livesum"

    @property
    def sample(self) -> str:
        """The name in a query; for a histogram without `_bucket`, `_sum` or `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


_REPLICA = ("stage", "replica")
_STAGE = ("stage",)

METRICS = (
    MetricDefinition(
        "replicas",
        "gauge",
        ("stage", "state"),
        "Replicas by state (`up`, `draining`, `down`, `error`), as this head sees them. All heads see the same "
        "replicas: take the maximum over heads, not the sum.",
        "livemostrecent",
    ),
    MetricDefinition(
        "replica_info",
        "gauge",
        (*_REPLICA, "engine"),
        "1 for each replica. The label `engine` is its number in `vllm:` metrics: 10000 * stage + replica.",
        "livemax",
    ),
    MetricDefinition(
        "requests_waiting",
        "gauge",
        _STAGE,
        "This head's requests that no engine works on: held by the head (`requests_held`), or sent to a replica and "
        "not begun there, as far as its engine has reported. Requests that wait before they are accepted count for the "
        "first stage.",
    ),
    MetricDefinition(
        "requests_running",
        "gauge",
        _STAGE,
        "This head's requests that an engine works on, in prefill or decode.",
    ),
    MetricDefinition(
        "expected_wait_seconds",
        "gauge",
        _STAGE,
        "Expected seconds until an engine begins a new request: `requests_waiting` divided by the rate at which "
        "requests leave the queue. Missing before a first output.",
        "livemax",
    ),
    MetricDefinition(
        "requests_queued",
        "gauge",
        ("class",),
        "This head's requests in the wait queue, by the classes of `--omni-admission`; a part of `requests_waiting`.",
    ),
    MetricDefinition(
        "class_expected_wait_seconds",
        "gauge",
        ("class",),
        "Expected seconds until an engine begins a new request at the end of its class's queue. 0 before a first "
        "output.",
        "livemax",
    ),
    MetricDefinition(
        "requests_refused",
        "counter",
        ("stage", "reason", "status"),
        "Requests refused on arrival or while they waited. `in_flight`, `token_rate`: a limit of the tenant; "
        "`queue_full`, `pushed_out`: other requests had precedence; `deadline`: too late. Status 429 is due to the "
        "tenant, 503 to the fleet.",
    ),
    MetricDefinition(
        "requests_recalled",
        "counter",
        (),
        "Requests that waited for one replica and went to another one that could begin them earlier.",
    ),
    MetricDefinition(
        "reserve_bubbles",
        "counter",
        (),
        "Times a replica had begun all requests it had received while requests for it waited at the head.",
    ),
    MetricDefinition(
        "tenant_requests_waiting",
        "gauge",
        ("tenant",),
        "Requests that wait at this head, for up to 50 tenants: those of the admission file, and the most active ones; "
        "`other`: all others; `none`: requests without a tenant.",
    ),
    MetricDefinition(
        "tenant_requests_in_flight",
        "gauge",
        ("tenant",),
        "Requests of these tenants that wait or run.",
    ),
    MetricDefinition(
        "tenant_tokens",
        "counter",
        ("tenant",),
        "Prompt and answer tokens of ended requests, counted from when the tenant got its own label.",
    ),
    MetricDefinition(
        "tenant_weight",
        "gauge",
        ("tenant",),
        "Weight of these tenants. While all have waiting requests, `tenant_tokens` grows in proportion to it.",
        "livemax",
    ),
    MetricDefinition(
        "stage_kv_cache_usage_ratio",
        "gauge",
        _STAGE,
        "Share of the KV memory of all replicas of a stage that is in use, 0 to 1. Missing without a replica. "
        "With several heads or API servers it is a lower bound, because an engine reports each step to one of them.",
        "livemax",
    ),
    MetricDefinition(
        "prefix_cache_hit_ratio",
        "gauge",
        _STAGE,
        "Share of prompt tokens found in the engines' prefix caches, 0 to 1, for this head's requests. An observation "
        "that is 30 s older has a third of the weight. With several API servers it is the value of any one of them. "
        "Missing before engines have reported it.",
        "livemostrecent",
    ),
    MetricDefinition("dispatches", "counter", _REPLICA, "Requests sent to a replica."),
    MetricDefinition(
        "requests_in_flight",
        "gauge",
        _REPLICA,
        "This head's requests that are charged to a replica; exact. May be summed over heads.",
    ),
    MetricDefinition(
        "prefill_tokens",
        "gauge",
        _REPLICA,
        "Prompt tokens of this head's requests that the replica must still compute, without those expected to be "
        "cached.",
    ),
    MetricDefinition(
        "decode_tokens",
        "gauge",
        _REPLICA,
        "Prompt and answer tokens of this head's requests on the replica that have had a first output.",
    ),
    MetricDefinition(
        "kv_cache_usage_ratio",
        "gauge",
        _REPLICA,
        "Share of a replica's KV memory in use, 0 to 1, as its engine last reported; 0 while it has no request of this "
        "head.",
        "livemax",
    ),
    MetricDefinition(
        "replica_restarts",
        "counter",
        _REPLICA,
        "Attempts to restart a lost engine of a head with one API server; 0 for all other replicas.",
    ),
    MetricDefinition(
        "decisions",
        "counter",
        ("stage", "policy", "reason"),
        "Dispatches by the reason of the decision. `bound`: only this replica was possible; `apart`: kept away from "
        "requests that may have crashed an engine, or such a request itself; `room`: to the replica where "
        "[headroom was left](admission.md#headroom) for tenants under their share; `unexplained`: the policy gives no "
        "reasons.",
    ),
    MetricDefinition(
        "decision_fallbacks",
        "counter",
        ("stage", "policy", "fallback"),
        "Dispatches for which the policy could not apply its full rule, by the cause; `policy-fault`: it failed.",
    ),
    MetricDefinition(
        "matched_tokens",
        "counter",
        (),
        "Prompt tokens that the policy expected to be cached, for requests whose engine reported cached tokens.",
    ),
    MetricDefinition(
        "cached_tokens",
        "counter",
        (),
        "Prompt tokens that engines reported as cached, for the requests that `matched_tokens_total` counts.",
    ),
    MetricDefinition(
        "requests_held",
        "gauge",
        ("where",),
        "Requests that the head holds. Because no replica can serve: `http` before they are accepted, `fleet` after; "
        "`move`: their replica is lost and they wait to be moved; `paused`: engines are paused.",
    ),
    MetricDefinition(
        "request_moves",
        "counter",
        ("way",),
        "Requests moved to another replica because theirs was lost. `restart`: from the beginning; `resume`: with the "
        "delivered tokens as part of the prompt; `replay`: from the beginning, dropping the delivered tokens.",
    ),
    MetricDefinition("tokens_swallowed", "counter", (), "Tokens that replays repeated and that were dropped."),
    MetricDefinition("replays_diverged", "counter", (), "Replays that did not repeat the delivered tokens."),
    MetricDefinition(
        "requests_failed",
        "counter",
        ("reason",),
        "Requests that ended with an error of the fleet; the log names them. `replica_lost`; `no_replica`, also if the "
        "head is ending; `query_of_death`: two engines seem to have crashed because of them.",
    ),
    MetricDefinition(
        "coordinator_connected",
        "gauge",
        (),
        "1 while the coordinator answers this head, else 0; missing in a fleet that other processes cannot join.",
        "livemin",
    ),
    MetricDefinition(
        "heads",
        "gauge",
        (),
        "Heads of the fleet that this head is in contact with, including itself; each API server counts as one. "
        "Missing in a fleet that other processes cannot join.",
        "livemin",
    ),
    *(MetricDefinition(name, "histogram", labels, meaning) for name, (labels, meaning) in HISTOGRAMS.items()),
)
"""In the order of the page."""

BY_NAME = {metric.name: metric for metric in METRICS}
