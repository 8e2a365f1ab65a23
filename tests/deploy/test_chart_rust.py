"""Heads of the Helm chart with vLLM's Rust front end: what is at the port for operators."""

import re

import pytest
import yaml
from helm_python.errors import HelmError

from tests.project.source_tree import ROOT

from .chart import RUST, Manifests, render, values
from .flags import flags_of

HEAD, NODE = ("Deployment", "fleet-llama-head"), ("StatefulSet", "fleet-llama-node")


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render(values(**RUST))


def test_heads_have_the_front_end_and_a_port_for_operators(manifests: Manifests) -> None:
    (head,), (node,) = (manifests.pod(*workload)["containers"] for workload in (HEAD, NODE))
    rust = {"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}
    assert [rust in container["env"] for container in (head, node)] == [True, False]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {"http": 8000, "admin": 8001, "fleet": 7500}
    flags = flags_of(manifests.command(*HEAD))
    assert flags["--omni-admin-port"] == "8001"
    # Otherwise that port is on loopback.
    assert "--omni-admin-key-file" in flags


def test_the_readiness_of_the_fleet_is_probed_and_the_life_of_the_front_end(manifests: Manifests) -> None:
    (head,) = manifests.pod(*HEAD)["containers"]
    asked = {name: head[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    version = {"path": "/version", "port": "http"}
    assert asked == {"startup": version, "liveness": version, "readiness": {"path": "/health", "port": "admin"}}


def test_nodes_and_prometheus_reach_the_port_for_operators(manifests: Manifests) -> None:
    service = manifests.get("Service", "fleet-llama")["spec"]["ports"]
    assert [(port["name"], port["port"], port["targetPort"]) for port in service] == [
        ("http", 80, "http"),
        ("admin", 8001, "admin"),
    ]
    (node,) = manifests.pod(*NODE)["containers"]
    assert {"name": "OMNI_HEAD_URL", "value": "http://fleet-llama:8001"} in node["env"]
    allowed = manifests.get("NetworkPolicy", "fleet-llama-head")["spec"]["ingress"][0]["ports"]
    assert allowed == [{"port": "http"}, {"port": "admin"}]
    endpoints = manifests.get("PodMonitor", "fleet-llama")["spec"]["podMetricsEndpoints"]
    assert [endpoint["port"] for endpoint in endpoints] == ["http", "admin"]


def test_what_the_heads_report_by_replica_is_dropped_at_the_front_end(manifests: Manifests) -> None:
    front_end, _ = manifests.get("PodMonitor", "fleet-llama")["spec"]["podMetricsEndpoints"]
    (rule,) = front_end["metricRelabelings"]
    assert (rule["sourceLabels"], rule["action"]) == (["__name__"], "drop")
    config = yaml.safe_load((ROOT / "examples" / "monitoring" / "prometheus.yml").read_text())
    _, of_front_ends = config["scrape_configs"]
    (same,) = of_front_ends["metric_relabel_configs"]
    assert (same["source_labels"], same["regex"], same["action"]) == (["__name__"], rule["regex"], "drop")
    kept = ("vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total", "vllm:num_preemptions_total")
    assert not [name for name in kept if re.fullmatch(rule["regex"], name)]


def test_without_an_admin_key_it_is_refused() -> None:
    with pytest.raises(HelmError, match=r"modelSpec llama: headSpec\.rustFrontend needs adminKey"):
        render(values(RUST["modelSpec"]))
