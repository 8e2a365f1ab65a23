"""Checks the queries of dashboards and rules against a scrape."""

import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

from vllm_omni_plugin.admin.metrics.catalogue import METRICS

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARDS = sorted((FOLDER / "grafana").glob("*.json"))
RULES = [FOLDER / "recording.yml", FOLDER / "alerts.yml"]

Scrape = Mapping[str, Set[str]]
"""Labels by sample name."""
OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus adds to each sample."""
_VARIABLES = {"$__rate_interval": "5m", "$job": ".+", "$stage": "0", "$replica": "0", "$engine": "0"}
_VALUES_OF = re.compile(r"label_values\((.+), (\w+)\)")
_SHOWN = re.compile(r"{{ ?(?:\$labels\.)?([a-z]\w*) ?}}")


class Query(NamedTuple):
    """One question to Prometheus.

    Attributes:
        where: the file and the panel or rule.
        expr: in PromQL, with values for the dashboards' variables.
        shown: labels of the answer that a legend or an annotation names.
    """

    where: str
    expr: str
    shown: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.where


class UnansweredError(Exception):
    """A query uses an unknown metric or label."""


def all_queries() -> list[Query]:
    """The queries of all dashboards and rules."""
    return [query for path in (*DASHBOARDS, *RULES) for query in queries_of(path)]


def queries_of(path: Path) -> list[Query]:
    return list(_of_dashboard(path) if path.suffix == ".json" else _of_rules(path))


def recorded(scrape: Scrape) -> dict[str, Set[str]]:
    """The scrape and the results of the recording rules."""
    known = {"up": OF_TARGETS} | {name: labels | OF_TARGETS for name, labels in scrape.items()}
    for rule in rules_of(RULES[0]):
        known[rule["record"]] = labels_of(promql.parse(rule["expr"]), known)
    return known


def of_the_catalogue() -> dict[str, Set[str]]:
    """All metrics of a head, as a scrape."""
    scrape: dict[str, Set[str]] = {}
    for metric in METRICS:
        labels = frozenset(metric.labels)
        if metric.kind == "histogram":
            scrape |= {f"{metric.sample}_bucket": labels | {"le"}}
            scrape |= dict.fromkeys((f"{metric.sample}_sum", f"{metric.sample}_count"), labels)
        else:
            scrape[metric.sample] = labels
    return scrape


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def check(query: Query, known: Scrape) -> None:
    """Raise `UnansweredError` if `recorded` lacks a metric or label of the query."""
    answered = labels_of(promql.parse(query.expr), known)
    if missing := query.shown - answered:
        raise UnansweredError(f"{query}: the answer has no {sorted(missing)}, only {sorted(answered)}")


def labels_of(expr: promql.Expr, known: Scrape) -> Set[str]:
    """The labels of an expression's result.

    Raises:
        UnansweredError: it names a metric that is not known, or a label that is not there where it is named.
    """
    match expr:
        case promql.VectorSelector(name=name):
            if name is None or name not in known:
                raise UnansweredError(f"there is no {name}")
            _require({matcher.name for matcher in expr.matchers.matchers}, known[name], expr)
            return known[name]
        case promql.MatrixSelector(vector_selector=selector):
            return labels_of(selector, known)
        case promql.AggregateExpr(modifier=modifier):
            kept = frozenset() if modifier is None else frozenset(modifier.labels)
            _require(kept, labels_of(expr.expr, known), expr)
            return kept
        case promql.Call(func=function):
            taken = {"le"} if function.name == "histogram_quantile" else set()
            inner = frozenset().union(*(labels_of(argument, known) for argument in expr.args))
            _require(taken, inner, expr)
            return inner - taken
        case promql.BinaryExpr(lhs=left, rhs=right):
            of_left, of_right = labels_of(left, known), labels_of(right, known)
            return of_left or of_right
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return labels_of(expr.expr, known)
        case promql.NumberLiteral():
            return frozenset()
    raise UnansweredError(f"not understood: {expr.prettify()}")


def _require(asked: Set[str], there: Set[str], expr: promql.Expr) -> None:
    if missing := asked - there:
        raise UnansweredError(f"{expr.prettify()}: there is no label {sorted(missing)}, only {sorted(there)}")


def _of_dashboard(path: Path) -> Iterator[Query]:
    board = json.loads(path.read_text())
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = _VALUES_OF.fullmatch(variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield Query(f"{path.name}: ${variable['name']}", _filled(selector), frozenset({label}))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            where = f"{path.name}: {panel['title']} {target['refId']}"
            yield Query(where, _filled(target["expr"]), _shown(target["legendFormat"]))


def _of_rules(path: Path) -> Iterator[Query]:
    for rule in rules_of(path):
        texts = " ".join(rule.get("annotations", {}).values())
        yield Query(f"{path.name}: {rule.get('alert') or rule['record']}", rule["expr"], _shown(texts))


def _shown(text: str) -> frozenset[str]:
    return frozenset(_SHOWN.findall(text))


def _filled(expr: str) -> str:
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value)
    return expr
