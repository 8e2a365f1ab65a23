"""Adds and removes engines in vLLM's metrics, which otherwise have only the engines known at the start."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib.metadata import version
from typing import Any

from prometheus_client import REGISTRY, Gauge
from prometheus_client.metrics import MetricWrapperBase
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_plugin.admin.metrics.multiprocess_metrics import in_multiprocess_mode
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

_ENGINE = "engine"
_PREFIX = "vllm:"
_STATE_GAUGES = ("vllm:cache_config_info", "vllm:engine_sleep_state")
"""Gauges that an engine's reports do not set. A replica that joins gets the values of the others."""

Make = Callable[[int], Any]
Slot = tuple[dict[int, Any], Make]
"""A dictionary by engine index, and a function that makes the entry for an index."""


class StatLabels:
    """Adds engines to the loggers of a `StatLoggerManager` and removes them. Used on AsyncLLM's loop.

    Searches the loggers of the new manager once for everything they keep by engine index, by the entry of the first
    engine. So it does not depend on the names of loggers and metrics. The list of engine indexes, which loggers and
    engine client share, is changed in place.
    """

    def __init__(self, manager: StatLoggerManager) -> None:
        self._manager = manager
        self._shared = in_multiprocess_mode()
        self._template = manager.engine_indexes[0]
        self._known = manager.engine_indexes
        self._metrics = list(_metrics_by_engine())
        self._children = {
            id(child): (metric, values)
            for metric in self._metrics
            for values, child in metric._metrics.items()
            if values[_position(metric)] == str(self._template)
        }
        self._config = next(each.vllm_config for each in manager.stat_loggers if isinstance(each, PrometheusStatLogger))
        self._states = [entry for entry in self._children.values() if entry[0]._name in _STATE_GAUGES]
        self._kept: int | None = None
        self._slots = [slot for each in manager.stat_loggers for slot in self._find(each, set())]
        if not self._children or not self._slots:
            logger.error(
                "vLLM %s keeps its metrics in a way that vllm-omni-plugin %s does not know: replicas that join later "
                "will be missing in vLLM's metrics. Install versions that support each other.",
                version("vllm"),
                version("vllm-omni-plugin"),
            )

    def add(self, index: int) -> None:
        """Label a replica that has joined; after one that left last, its label goes only now."""
        kept, self._kept = self._kept, None
        if index not in self._known:
            self._add(index)
        if self._shared:
            # Of the reports of all processes the latest counts, and its process may have died: report an idle engine.
            self._manager.record(SchedulerStats(), None, engine_idx=index)
        if kept is not None and kept != index:
            self.remove(kept)

    def _add(self, index: int) -> None:
        for by_engine, make in self._slots:
            by_engine[index] = make(index)
        for metric, values in self._children.values():
            # Some metrics are in no dictionary by engine, but need samples too.
            metric.labels(*_for_engine(metric, values, index))
        for metric, values in self._states:
            state = metric.labels(*_for_engine(metric, values, self._known[0]))._value.get()
            metric.labels(*_for_engine(metric, values, index)).set(state)
        self._known.append(index)

    def remove(self, index: int) -> None:
        """Remove the engine with this index and its gauges, if it is known. Its counts stay, so that no sum falls.

        The last engine is kept until another is added, because vLLM's loggers need one. In the multiprocess mode of
        prometheus_client, samples cannot be removed.
        """
        if index not in self._known:
            return
        if self._known == [index]:
            self._kept = index
            return
        self._known.remove(index)
        for by_engine, _ in self._slots:
            by_engine.pop(index, None)
        for metric in () if self._shared else [metric for metric in self._metrics if isinstance(metric, Gauge)]:
            position = _position(metric)
            for values in [values for values in metric._metrics if values[position] == str(index)]:
                metric.remove(*values)

    def _find(self, holder: Any, seen: set[int]) -> Iterator[Slot]:
        """All dictionaries by engine index in an object and the objects that it refers to."""
        if id(holder) in seen:
            return
        seen.add(id(holder))
        values = holder.values() if isinstance(holder, dict) else vars(holder).values()
        if isinstance(holder, dict) and (make := self._maker(holder.get(self._template))) is not None:
            yield holder, make
            return
        for value in list(values):
            # Configurations (dataclasses), metrics and plain values have none.
            if isinstance(value, dict) or (
                hasattr(value, "__dict__")
                and not isinstance(value, type | MetricWrapperBase)
                and not callable(value)
                and not is_dataclass(value)
            ):
                yield from self._find(value, seen)

    def _maker(self, entry: Any) -> Make | None:
        """A function that makes entries like this one of the first engine; None if it is not such an entry."""
        if id(entry) in self._children:
            return lambda index: self._child(entry, index)
        if isinstance(entry, StatLoggerBase):
            return lambda index: type(entry)(self._config, index)
        if isinstance(entry, SchedulerStats):
            return lambda index: SchedulerStats()
        if isinstance(entry, list) and entry:
            if all(id(item) in self._children for item in entry):
                return lambda index: [self._child(item, index) for item in entry]
            if entry[1:] == [str(self._template)]:
                return lambda index: [entry[0], str(index)]
        return None

    def _child(self, template: Any, index: int) -> Any:
        metric, values = self._children[id(template)]
        return metric.labels(*_for_engine(metric, values, index))


def _metrics_by_engine() -> Iterator[Any]:
    for metric in REGISTRY._collector_to_names:
        if isinstance(metric, MetricWrapperBase) and metric._name.startswith(_PREFIX) and _ENGINE in metric._labelnames:
            yield metric


def _position(metric: Any) -> int:
    position: int = metric._labelnames.index(_ENGINE)
    return position


def _for_engine(metric: Any, values: tuple[str, ...], index: int) -> tuple[str, ...]:
    position = _position(metric)
    return (*values[:position], str(index), *values[position + 1 :])
