"""All of our metrics: their names, types and labels, and what they mean. docs/metrics.md is written from it."""

from typing import Literal, NamedTuple

from vllm_omni_plugin.orchestrator.requests.counters import HISTOGRAMS

PREFIX = "vllm_omni_fleet:"
OverProcesses = Literal["livesum", "livemostrecent", "livemax", "livemin"]


class MetricDefinition(NamedTuple):
    """One metric.

    Attributes:
        name: without the prefix, and without `_total` for a counter.
        kind: its type.
        labels: their names.
        meaning: with the unit; the help text of a scrape.
        multiprocess_mode: what becomes of a gauge that several API servers have, as prometheus_client calls it: the sum of
            what each has of its own, or one word for what all of them see.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    multiprocess_mode: OverProcesses = "livesum"

    @property
    def sample(self) -> str:
        """The name in a query, for a histogram without `_bucket`, `_sum` or `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


_REPLICA = ("stage", "replica")
_STAGE = ("stage",)

METRICS = (
    MetricDefinition(
        "replicas",
        "gauge",
        ("stage", "state"),
        "Replicas by state (`up`, `draining`, `down`, `error`), as this head sees them. Heads see the same ones: take "
        "the highest of them, not the sum.",
        "livemostrecent",
    ),
    MetricDefinition(
        "replica_info",
        "gauge",
        (*_REPLICA, "engine"),
        "1 for each replica. Its label `engine` is the number that `vllm:` metrics have for it: 10000 * stage + "
        "replica.",
        "livemax",
    ),
    MetricDefinition(
        "requests_waiting",
        "gauge",
        _STAGE,
        "This head's requests that no engine works on: held by the head (`requests_held`), or sent to a replica and "
        "not begun there as far as its engine has reported. What is held before it is accepted counts for the first "
        "stage.",
    ),
    MetricDefinition(
        "requests_running",
        "gauge",
        _STAGE,
        "This head's requests that an engine works on, their prompts or their answers.",
    ),
    MetricDefinition(
        "expected_wait_seconds",
        "gauge",
        _STAGE,
        "Seconds that a request which came now would wait until an engine begins it: `requests_waiting` over the rate "
        "at which requests leave the queue. Missing before a first output.",
        "livemax",
    ),
    MetricDefinition(
        "requests_queued",
        "gauge",
        ("class",),
        "This head's requests that wait at it until a replica can begin them, by the classes of `--omni-admission`; "
        "they are among `requests_waiting`.",
    ),
    MetricDefinition(
        "class_expected_wait_seconds",
        "gauge",
        ("class",),
        "Seconds until a request that came now, as the last of its class, would be begun if it had to wait. 0 before a "
        "first output.",
        "livemax",
    ),
    MetricDefinition(
        "requests_refused",
        "counter",
        ("stage", "reason", "status"),
        "Requests that were refused, at once or while they waited: `in_flight`, `token_rate`: a limit of their "
        "tenant; `queue_full`, `pushed_out`: others went first; `deadline`: too late. Status 429 is for the tenant, "
        "503 for the fleet.",
    ),
    MetricDefinition(
        "requests_recalled",
        "counter",
        (),
        "Requests that waited for one replica and went to another one, which could begin them earlier.",
    ),
    MetricDefinition(
        "reserve_bubbles",
        "counter",
        (),
        "Times a replica had begun all that it had got while requests waited at the head for it.",
    ),
    MetricDefinition(
        "tenant_requests_waiting",
        "gauge",
        ("tenant",),
        "Requests that wait at this head, of up to 50 tenants: those of the admission file, and those that were served "
        "most; `other`: all others; `none`: nobody was named.",
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
        "Tokens of prompts and answers of requests that have ended, of these tenants since they are told apart.",
    ),
    MetricDefinition(
        "tenant_weight",
        "gauge",
        ("tenant",),
        "Weight of these tenants: their shares of `tenant_tokens` follow it while all have requests waiting.",
        "livemax",
    ),
    MetricDefinition(
        "stage_kv_cache_usage_ratio",
        "gauge",
        _STAGE,
        "Share of the KV memory of all replicas of a stage that is in use, 0 to 1. Missing without a replica. "
        "With several heads or API servers a lower bound: an engine reports each step to one of them.",
        "livemax",
    ),
    MetricDefinition(
        "prefix_cache_hit_ratio",
        "gauge",
        _STAGE,
        "Share of prompt tokens that engines had in their prefix caches, 0 to 1, of this head's requests; what is 30 s "
        "older weighs a third. Of several API servers it is that of any one. Missing before engines "
        "have said so of any.",
        "livemostrecent",
    ),
    MetricDefinition("dispatches", "counter", _REPLICA, "Requests sent to a replica."),
    MetricDefinition(
        "requests_in_flight",
        "gauge",
        _REPLICA,
        "This head's requests that a replica is charged with, exact. May be added up over heads.",
    ),
    MetricDefinition(
        "prefill_tokens",
        "gauge",
        _REPLICA,
        "Prompt tokens of this head's requests there that are still to be computed, less those expected to be cached.",
    ),
    MetricDefinition(
        "decode_tokens",
        "gauge",
        _REPLICA,
        "Tokens of prompts and answers of this head's requests there that have had a first output.",
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
        "Attempts to start a lost engine again, of a head with one API server; 0 for all others.",
    ),
    MetricDefinition(
        "decisions",
        "counter",
        ("stage", "policy", "reason"),
        "Dispatches, by what decided where they went. `bound`: they could go nowhere "
        "else; `apart`: kept away from requests that an engine may have died of, or one of these; `room`: to where "
        "[room was left](admission.md#the-order) for tenants under their share; `unexplained`: the policy gives no "
        "reasons.",
    ),
    MetricDefinition(
        "decision_fallbacks",
        "counter",
        ("stage", "policy", "fallback"),
        "Dispatches for which the policy used less than its rule, by why; `policy-fault`: it failed.",
    ),
    MetricDefinition(
        "matched_tokens",
        "counter",
        (),
        "Prompt tokens that the policy expected to be cached, of requests whose engine said how many were.",
    ),
    MetricDefinition(
        "cached_tokens",
        "counter",
        (),
        "Prompt tokens that engines said they had cached, of the requests that `matched_tokens_total` counts.",
    ),
    MetricDefinition(
        "requests_held",
        "gauge",
        ("where",),
        "Requests that the head keeps back. Because no replica can serve: `http` before they are accepted, `fleet` "
        "after; `move`: they have lost their replica and wait for their turn to move; `paused`: engines refuse them "
        "until the end of a pause.",
    ),
    MetricDefinition(
        "request_moves",
        "counter",
        ("way",),
        "Requests sent again to another replica because theirs was lost. `restart`: from the beginning; `resume`: with "
        "what was delivered as part of the prompt; `replay`: from the beginning, and what was delivered is dropped.",
    ),
    MetricDefinition("tokens_swallowed", "counter", (), "Tokens that replays repeated and no client got twice."),
    MetricDefinition("replays_diverged", "counter", (), "Replays that did not repeat what had been delivered."),
    MetricDefinition(
        "requests_failed",
        "counter",
        ("reason",),
        "Requests that ended with an error of the fleet; the log says which. `replica_lost`; `no_replica`, also of a "
        "head that is ending; `query_of_death`: two engines died of them, or so it seems.",
    ),
    MetricDefinition(
        "coordinator_connected",
        "gauge",
        (),
        "1 while the coordinator answers this head, else 0; missing in a fleet that nobody can join.",
        "livemin",
    ),
    MetricDefinition(
        "heads",
        "gauge",
        (),
        "Heads of the fleet that this one hears of, and itself; each of several API servers is one. Missing in a fleet "
        "that nobody can join.",
        "livemin",
    ),
    *(MetricDefinition(name, "histogram", labels, meaning) for name, (labels, meaning) in HISTOGRAMS.items()),
)
"""In the order of the page."""

BY_NAME = {metric.name: metric for metric in METRICS}
