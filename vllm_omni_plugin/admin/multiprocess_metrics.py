"""Our metrics in the files that prometheus_client's multiprocess mode sums over all processes of a server.

In that mode, which vLLM switches on for several API servers, a scrape of any of them reads the files of all, and
collectors are never asked. So what ours would say is written there from time to time.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

_INTERVAL_S = 1.0

_GAUGE_MODES = {
    "vllm_omni_fleet:replicas": "livemostrecent",
    "vllm_omni_fleet:kv_cache_usage_ratio": "livemax",
    "vllm_omni_fleet:coordinator_connected": "livemin",
    "vllm_omni_fleet:heads": "livemin",
}
"""What is no API server's own and must not be added up: all see the same replicas, caches and heads."""
_OWN = "livesum"

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


def in_multiprocess_mode() -> bool:
    """Whether this process counts in files."""
    return bool(values.ValueClass._multiprocess)


class MetricFiles:
    """Writes what a collector says into this process's files, once a second. Thread-safe.

    Args:
        collector: of gauges, counters and histograms. Its gauges are summed over the processes unless `_GAUGE_MODES`
            says otherwise, those of processes that have ended left out.
        interval: seconds between two writings.
    """

    def __init__(self, collector: Collector, interval: float = _INTERVAL_S) -> None:
        self._collector = collector
        self._interval = interval
        self._lock = threading.Lock()
        self._written: dict[Key, _Written] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-metrics", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write what the collector says now. A gauge that it no longer has becomes 0, a counter stays."""
        with self._lock:
            now = time.time()
            seen = set()
            for family in self._collector.collect():
                for name, labels, value in _samples(family):
                    key = name, tuple(sorted(labels.items()))
                    seen.add(key)
                    if key not in self._written:
                        self._written[key] = _Written(family, name, labels)
                    self._written[key].set(value, now)
            for key in self._written.keys() - seen:
                self._written[key].end(now)

    def close(self) -> None:
        """Write once more, and stop."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closed.wait(self._interval)
            try:
                self.write()
            except Exception:
                # As when a scrape fails: the next may not.
                logger.exception("The fleet's metrics could not be written.")


class _Written:
    """One value in a file."""

    def __init__(self, family: Metric, name: str, labels: dict[str, str]) -> None:
        self._is_gauge = family.type == "gauge"
        mode = _GAUGE_MODES.get(family.name, _OWN) if self._is_gauge else ""
        self._value: Any = values.ValueClass(
            family.type,
            family.name,
            name,
            tuple(labels),
            tuple(labels.values()),
            family.documentation,
            multiprocess_mode=mode,
        )
        # The file of a process that had this process's number before is counted on.
        self._before = 0.0 if self._is_gauge else float(self._value.get())
        self._last = 0.0

    def set(self, value: float, now: float) -> None:
        # A replica that takes the place of one that left begins to count anew, which in a sum over processes would look
        # as if all of them had.
        if not self._is_gauge and value < self._last:
            self._before += self._last
        self._last = value
        self._value.set(self._before + value, now)

    def end(self, now: float) -> None:
        if self._is_gauge:
            self.set(0.0, now)


def _samples(family: Metric) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of a family as files have them: there, each bucket counts its own observations only."""
    below = 0.0
    for sample in family.samples:
        if family.type != "histogram" or sample.name.endswith("_sum"):
            yield sample.name, sample.labels, sample.value
        elif sample.name.endswith("_bucket"):
            yield sample.name, sample.labels, sample.value - below
            below = sample.value if sample.labels["le"] != "+Inf" else 0.0
