"""Generates docs/metrics.md from the catalogue of metrics.

python -m tools.metrics_page
"""

from pathlib import Path

from vllm_omni_plugin.admin.metrics.catalogue import METRICS, MetricDefinition

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_MODES = {"livesum": "", "livemostrecent": " *Newest.*", "livemax": " *Highest.*", "livemin": " *Lowest.*"}
_FRAME = """\
# Metrics

How to use them: [monitoring.md](monitoring.md). `GET /metrics` of a head has all of vLLM's metrics, whose label
`engine` is `10000 * stage + replica`, and those below; with vLLM's Rust front end
[two ports have parts of them](how-to/rust-front-end.md#operate-it). When a replica leaves, its gauges disappear and its
counts stay. The last three are histograms. Metrics with the labels
`class` and `tenant` exist with `--omni-admission` or `--omni-tenant-header` only.

{rows}
With `--api-server-count` a scrape of any process returns the metrics of all, at most a second late: the sum, or where
it is said the newest, highest or lowest value.
Counters of a process that died stay, its gauges disappear; gauges of a replica that left become 0; `process_*` is
missing.
"""


def page() -> str:
    """The text of the page."""
    return _FRAME.format(rows="".join(map(_row, METRICS)))


def _row(metric: MetricDefinition) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"- `{metric.sample}{labels}`: {metric.meaning}{_MODES[metric.multiprocess_mode]}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
