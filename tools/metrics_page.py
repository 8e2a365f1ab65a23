"""Writes docs/metrics.md from the catalogue of our metrics.

python -m tools.metrics_page
"""

from pathlib import Path

from vllm_omni_plugin.admin.metrics.catalogue import METRICS, MetricDefinition

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_OVER_PROCESSES = {"livesum": "sum", "livemostrecent": "newest", "livemax": "highest", "livemin": "lowest"}
_FRAME = """\
# Metrics

This page is written by `python -m tools.metrics_page` from `vllm_omni_plugin/admin/metrics/catalogue.py`. How to watch
a fleet with it is in [monitoring.md](monitoring.md).

`GET /metrics` of a head has everything vLLM has, with `engine="<replica>"`, in a pipeline `10000 * stage + replica`, so
that `engine="20001"` is replica 2.1. Tokens and latencies of requests count for the replica that answered through the
server. Model name and `cache_config_info` of the stage that reads the prompt label all.

And it has these. Labels of a replica that left vanish with it. Reasons and fallbacks of decisions are those of
[policies.md](policies.md); a histogram has `_bucket`, `_sum` and `_count`.

| metric | type | labels | meaning | of several API servers |
|---|---|---|---|---|
{rows}
The last column is for `--api-server-count`, where a scrape of any process speaks for all, at most a second late. Of a
process that died, what it counted stays, and what it had in flight does not. Labels of a replica that left stay
there, with 0 for gauges; what is missing elsewhere becomes 0 once it has been there. Metrics of processes (`process_*`)
are missing, as with vLLM alone. `PROMETHEUS_MULTIPROC_DIR` need not be set.
"""


def page() -> str:
    """The text of the page."""
    return _FRAME.format(rows="".join(map(_row, METRICS)))


def _row(metric: MetricDefinition) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    together = _OVER_PROCESSES[metric.multiprocess_mode]
    return f"| `{metric.sample}` | {metric.kind} | {labels} | {metric.meaning} | {together} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
