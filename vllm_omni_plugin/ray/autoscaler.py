"""Computes how many nodes a stage needs, from the expected wait that a head reports in its metrics."""

import math
from http.client import HTTPException
from typing import NamedTuple
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_plugin.errors import ServerUnavailableError

WAIT = "vllm_omni_fleet:expected_wait_seconds"
REPLICAS = "vllm_omni_fleet:replicas"
_TIMEOUT_S = 2.0
WINDOW_S = 300.0
"""A node is removed after this time without waits; the same as the window of Kubernetes' autoscaler."""
_CALM = 0.5
"""Waits below this share of the target count as none, so that a wait near the target changes nothing."""


class StageLoad(NamedTuple):
    """The number of serving replicas of a stage, and its expected wait in seconds, as a head reports them."""

    serving: int
    expected_wait: float


def fetch_stage_load(url: str, stage: int) -> StageLoad:
    """Read the load of a stage from a head's metrics. Raises ServerUnavailableError if they do not have it (yet)."""
    try:
        # Without the proxies of the environment.
        with build_opener(ProxyHandler({})).open(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return parse_stage_load(answer.read().decode(), stage)
    except (OSError, HTTPException, ValueError) as error:
        raise ServerUnavailableError(f"{url} does not report the expected wait: {error}") from error


def parse_stage_load(metrics: str, stage: int) -> StageLoad:
    """Read the load of a stage from a scrape. Raises ValueError if it has no finite wait of this stage."""
    lines = [line for line in metrics.splitlines(keepends=True) if line.startswith((f"{WAIT}{{", f"{REPLICAS}{{"))]
    samples = [
        sample
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
        if sample.labels.get("stage") == str(stage)
    ]
    waits = [sample.value for sample in samples if sample.name == WAIT]
    if not waits or not all(math.isfinite(sample.value) for sample in samples):
        raise ValueError(f"its metrics have none of stage {stage}")
    up = sum(sample.value for sample in samples if sample.name == REPLICAS and sample.labels.get("state") == "up")
    return StageLoad(int(up), max(waits))


class Autoscaler:
    """Sets the number of nodes: upwards at once, downwards one node at a time after a calm window.

    The formula for an increase is that of Kubernetes' HorizontalPodAutoscaler, ceil(serving * metric / target). Queues
    grow while models load, so until all requested nodes serve, it is applied once per window.
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
    """

    def __init__(self, minimum: int, maximum: int, target_wait: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._target = target_wait
        self._wanted = minimum
        self._raised_at = float("-inf")
        self._calm_since: float | None = None

    def wanted(self, now: float, load: StageLoad | None) -> int:
        """The number of nodes wanted now. `load` is None if the head does not report it; then the number stays."""
        if load is None or load.expected_wait > self._target * _CALM:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if load is not None and load.expected_wait > self._target:
            # Replicas of the head itself, or of a node with several, do not count as nodes.
            serving = max(1, min(load.serving, self._wanted))
            needed = math.ceil(min(self._maximum, serving * load.expected_wait / self._target))
            if needed > self._wanted and (load.serving >= self._wanted or now - self._raised_at >= WINDOW_S):
                self._wanted, self._raised_at = needed, now
        elif self._calm_since is not None and now - self._calm_since >= WINDOW_S and self._wanted > self._minimum:
            self._wanted -= 1
            self._calm_since = now
        return self._wanted
