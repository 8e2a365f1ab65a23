"""Every query of the dashboards and rules can be answered from what a head tells, and means what its legend shows.

What they ask of vLLM's own metrics is taken for granted here; `tests/engine/test_monitoring.py` asks a real fleet.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from .queries import (
    DASHBOARDS,
    FOLDER,
    RULES,
    all_queries,
    check,
    of_the_catalogue,
    queries_of,
    recorded,
    rules_of,
)

OF_VLLM = {"model_name", "engine", "finished_reason", "le"}


def test_every_query_uses_existing_metrics_and_labels() -> None:
    queries = all_queries()
    names = {name for query in queries for name in re.findall(r"\bvllm:\w+", query.expr)}
    told = recorded(of_the_catalogue() | dict.fromkeys(names, OF_VLLM))
    for query in queries:
        check(query, told)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_have_descriptions(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] == "row" or panel["description"].endswith(".")
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        apart = [one[a] + one[b] <= other[a] or other[a] + other[b] <= one[a] for a, b in (("x", "w"), ("y", "h"))]
        assert any(apart), (one, other)


def test_every_alert_has_a_unit_test_and_a_description() -> None:
    groups = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    tested = {test["alertname"] for group in groups for test in group["alert_rule_test"] if "exp_alerts" in test}
    alerts = rules_of(FOLDER / "alerts.yml")
    assert tested == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_prometheus_loads_all_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == [path.name for path in RULES]
    assert all(queries_of(path) for path in RULES)
