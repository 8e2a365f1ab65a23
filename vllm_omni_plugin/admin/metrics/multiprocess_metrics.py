"""Writes our metrics to the files of prometheus_client's multiprocess mode.

vLLM uses that mode for several API servers: a scrape of any of them reads the files of all processes, and does not call
collectors. Histograms write to the files themselves; gauges and counters are copied to them once a second.
"""

import os
import threading
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_omni_plugin.admin.metrics.catalogue import METRICS, PREFIX
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

_INTERVAL_S = 1.0

_GAUGE_MODES = {f"{PREFIX}{metric.name}": metric.multiprocess_mode for metric in METRICS}


def in_multiprocess_mode() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


class MetricFiles:
    """Writes the gauges and counters of a collector into this process's files every `interval` seconds. Thread-safe."""

    def __init__(self, collector: Collector, interval: float = _INTERVAL_S) -> None:
        self._collector = collector
        self._interval = interval
        self._lock = threading.Lock()
        self._metrics: dict[str, Any] = {}
        # By metric name and label values.
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-metrics", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write the current values. A gauge that has disappeared becomes 0; a counter stays."""
        with self._lock:
            values = {
                (family.name, tuple(sample.labels.values())): sample.value
                for family in self._collector.collect()
                if self._can_write(family)
                for sample in family.samples
            }
            gone = {
                (name, labels): 0.0 if isinstance(self._metrics[name], Gauge) else before
                for (name, labels), before in self._written.items()
                if (name, labels) not in values
            }
            for (name, labels), value in (values | gone).items():
                metric = self._metrics[name].labels(*labels) if labels else self._metrics[name]
                if isinstance(metric, Gauge):
                    metric.set(value)
                elif value:
                    before = self._written.get((name, labels), 0.0)
                    # The counter of a new replica with a reused id starts again from 0.
                    metric.inc(value - before if value >= before else value)
            self._written = values | gone

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _can_write(self, family: Metric) -> bool:
        """Whether the family is a gauge or counter; registers its metric at the first sample."""
        kind = {"gauge": Gauge, "counter": Counter}.get(family.type)
        if kind is not None and family.name not in self._metrics and family.samples:
            more = {"multiprocess_mode": _GAUGE_MODES[family.name]} if kind is Gauge else {}
            labels = tuple(family.samples[0].labels)
            self._metrics[family.name] = kind(family.name, family.documentation, labels, registry=None, **more)
        return kind is not None

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closed.wait(self._interval)
            try:
                self.write()
            except Exception:
                # The next attempt may succeed.
                logger.exception("The fleet's metrics could not be written.")
