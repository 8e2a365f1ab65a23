"""The manifests of the Helm chart, against Kubernetes' schemas and the needs of heads and nodes."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint

from .chart import CHART, EVERYTHING, MODEL, NAMESPACE, RUST, STAGES, Manifests, render, values
from .flags import flags_of

HEADS = (("Deployment", "fleet-llama-head"), ("Deployment", "fleet-llama-heads"))
NODE = ("StatefulSet", "fleet-llama-node")
WORKLOADS = (*HEADS, NODE)
GIVEN = [values(), values(**EVERYTHING), values(**RUST), values(**STAGES)]
IDS = ["least", "everything", "with the Rust front end", "with stages"]
OF_OPERATORS = ("PodMonitor", "ScaledObject")
"""Kinds without a schema in the package."""


@pytest.fixture(scope="module")
def everything() -> Manifests:
    return render(values(**EVERYTHING))


@pytest.fixture(scope="module")
def least() -> Manifests:
    return render(values())


@pytest.mark.parametrize("given", GIVEN, ids=IDS)
def test_helms_linter_accepts_the_chart(given: dict[str, Any]) -> None:
    report = lint(CHART, given, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["error"] != "icon is recommended"] == []


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("given", GIVEN, ids=IDS)
def test_every_manifest_matches_the_schema_of_kubernetes(given: dict[str, Any], version: str) -> None:
    checked = [found for found in render(given).objects if found["kind"] not in OF_OPERATORS]
    assert len(checked) > 8
    for found in checked:
        assert kubernetes_validate.validate(found, version, strict=True) == version
        assert found["metadata"]["namespace"] == NAMESPACE


def test_a_model_has_heads_nodes_and_what_belongs_to_them(least: Manifests) -> None:
    assert least.names() == [
        "ConfigMap/fleet-probe",
        "Deployment/fleet-llama-head",
        "Deployment/fleet-llama-heads",
        "NetworkPolicy/fleet-llama-head",
        "NetworkPolicy/fleet-llama-node",
        "PodDisruptionBudget/fleet-llama-head",
        "PodDisruptionBudget/fleet-llama-node",
        "Secret/fleet-secrets",
        "Service/fleet-llama",
        "Service/fleet-llama-fleet",
        "Service/fleet-llama-nodes",
        "StatefulSet/fleet-llama-node",
    ]


def test_heads_and_nodes_have_equal_shared_flags(everything: Manifests) -> None:
    shared = {
        "--dtype": "bfloat16",
        "--max-model-len": "1048576",
        "--runner": "generate",
        "--convert": "none",
        "--no-enable-prefix-caching": "",
        "--enable-chunked-prefill": "",
        "--enable-lora": "",
        "--max-loras": "4",
        "--seed": "3",
    }
    nodes_own = {"--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.9", "--max-num-seqs": "32"}
    for workload in WORKLOADS:
        command = everything.command(*workload)
        assert command[:3] == ["vllm", "serve", "org/llama"]
        flags = flags_of(command)
        assert shared.items() <= flags.items()
        assert (nodes_own.items() <= flags.items()) == (workload == NODE)
    head = flags_of(everything.command(*HEADS[0]))
    assert head["--chat-template"] == EVERYTHING["modelSpec"][0]["chatTemplate"]
    assert head["--omni-lb-config"] == '{"overlap_weight":2}'


def test_all_heads_and_nodes_join_one_coordinator(everything: Manifests) -> None:
    first, others, node = (everything.get(*workload)["spec"] for workload in WORKLOADS)
    assert (first["replicas"], first["strategy"]["type"], others["replicas"]) == (1, "Recreate", 2)
    service = everything.get("Service", "fleet-llama-fleet")["spec"]
    labels = [found["template"]["metadata"]["labels"].items() for found in (first, others, node)]
    assert [service["selector"].items() <= of_pod for of_pod in labels] == [True, False, False]
    # The head becomes ready only after nodes have found it here.
    assert service["publishNotReadyAddresses"] is True
    flags = [flags_of(everything.command(*workload)) for workload in WORKLOADS]
    assert [found["--omni-master-address"] for found in flags] == ["0.0.0.0", "fleet-llama-fleet", "fleet-llama-fleet"]
    assert {found["--omni-master-port"] for found in flags} == {str(service["ports"][0]["port"])} == {"7500"}
    assert ["--omni-join" in found for found in flags] == [False, True, False]
    assert [found.get("--omni-dp-size-local") for found in flags] == ["0", None, "1"]


def test_clients_reach_only_the_heads_of_their_model(everything: Manifests) -> None:
    selector = everything.get("Service", "fleet-llama")["spec"]["selector"].items()
    others = [*WORKLOADS, ("Deployment", "fleet-qwen-head")]
    labels = [everything.get(*workload)["spec"]["template"]["metadata"]["labels"].items() for workload in others]
    assert [selector <= of_pod for of_pod in labels] == [True, True, False, False]


def test_selectors_match_their_pods(everything: Manifests) -> None:
    for found in everything.objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            selector = found["spec"]["selector"]["matchLabels"].items()
            assert selector <= found["spec"]["template"]["metadata"]["labels"].items()
            # A new version of the chart alone must not restart pods.
            assert not [name for name in found["spec"]["template"]["metadata"]["labels"] if "version" in name]


@pytest.mark.parametrize(
    "given",
    [{}, {"headSpec": {"preStopSleep": 5, "shutdownTimeout": 600}, "nodeSpec": {"drainTimeout": 900}}],
)
def test_grace_periods_exceed_the_requests_timeouts(given: dict[str, Any]) -> None:
    manifests = render(values([MODEL | given]))
    for head in HEADS:
        pod = manifests.pod(*head)
        sleep = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        timeout = flags_of(manifests.command(*head))["--shutdown-timeout"]
        assert sleep[0] == "sleep"
        assert pod["terminationGracePeriodSeconds"] == int(sleep[1]) + int(timeout) + 30
        assert int(timeout) > 0
    drain = flags_of(manifests.command(*NODE))["--omni-drain-timeout"]
    assert manifests.pod(*NODE)["terminationGracePeriodSeconds"] == int(drain) + 30


def test_probes_distinguish_loading_from_dead(everything: Manifests) -> None:
    for head in HEADS:
        (container,) = everything.pod(*head)["containers"]
        paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        # /health is 503 while no node serves; killing heads would not help.
        assert paths == {"startup": "/version", "liveness": "/version", "readiness": "/health"}
    (node,) = everything.pod(*NODE)["containers"]
    assert "livenessProbe" not in node
    assert node["startupProbe"]["exec"] == node["readinessProbe"]["exec"]
    for container in (node, everything.pod(*HEADS[0])["containers"][0]):
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


def test_only_its_user_can_read_the_secret_file(everything: Manifests) -> None:
    for workload in WORKLOADS:
        pod = everything.pod(*workload)
        (container,), (first,) = pod["containers"], pod["initContainers"]
        run = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "run")
        mounts = {mount["name"]: mount["mountPath"] for mount in first["volumeMounts"]}
        assert first["command"][:2] == ["sh", "-c"]
        assert first["command"][2] == f"umask 077 && cp {mounts['secrets']}/* {run}/"
        assert flags_of(everything.command(*workload))["--omni-secret-file"] == f"{run}/fleet.secret"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["run"]["emptyDir"]["medium"] == "Memory"
        files = {
            item["path"] for source in volumes["secrets"]["projected"]["sources"] for item in source["secret"]["items"]
        }
        assert files == ({"fleet.secret"} if workload == NODE else {"fleet.secret", "admin.keys"})
        # The same user must own the file.
        assert first.get("securityContext") == container.get("securityContext")
    assert flags_of(everything.command(*HEADS[0]))["--omni-admin-key-file"] == "/run/vllm-omni/admin.keys"


def test_a_changed_secret_restarts_the_pods() -> None:
    pods = [
        render(values(fleetSecret=secret)).get(*NODE)["spec"]["template"]["metadata"]["annotations"]
        for secret in ("0123456789abcdef", "0123456789abcdef", "fedcba9876543210")
    ]
    assert pods[0] == pods[1] != pods[2]


def test_network_policies_allow_only_the_needed_ports(everything: Manifests) -> None:
    def to(policy: str) -> list[tuple[Any, list[Any]]]:
        rules = everything.get("NetworkPolicy", policy)["spec"]["ingress"]
        return [(rule["ports"][0], rule.get("from", [])) for rule in rules]

    (http, clients), (master, fleet) = to("fleet-llama-head")
    assert http == {"port": "http"}
    assert clients[0] == {"namespaceSelector": {}}
    # The nodes' probes ask a head.
    assert clients[1]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"
    assert master == {"port": 7500}
    assert "app.kubernetes.io/component" not in fleet[0]["podSelector"]["matchLabels"]
    ((ports, heads),) = to("fleet-llama-node")
    assert f"{ports['port']}-{ports['endPort']}" == flags_of(everything.command(*NODE))["--omni-replica-ports"]
    assert heads[0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"


def test_a_node_has_ports_for_its_engines_and_all_heads() -> None:
    spec = yaml.safe_load((CHART / "values.yaml").read_text())["servingEngineSpec"]["modelDefaults"]
    first, last = map(int, spec["nodeSpec"]["ports"].split("-"))
    # While a head is replaced there is one more.
    assert last - first + 1 >= 8 * (1 + 2 * (spec["headSpec"]["replicaCount"] + 1))


def test_prometheus_scrapes_each_head(everything: Manifests, least: Manifests) -> None:
    assert not [name for name in least.names() if name.startswith("PodMonitor")]
    monitor = everything.get("PodMonitor", "fleet-llama")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    ports = [port["name"] for port in everything.pod(*HEADS[0])["containers"][0]["ports"]]
    assert endpoint["port"] in ports
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    labels = [everything.get(*found)["spec"]["template"]["metadata"]["labels"].items() for found in WORKLOADS]
    assert [selector <= of_pod for of_pod in labels] == [True, True, False]


def test_keda_scales_by_the_collected_metrics(everything: Manifests, least: Manifests) -> None:
    assert least.get(*NODE)["spec"]["replicas"] == 1
    # With KEDA an upgrade of the chart must not set the number.
    assert "replicas" not in everything.get(*NODE)["spec"]
    scaled = everything.get("ScaledObject", "fleet-llama-node")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": NODE[0], "name": NODE[1]}
    assert scaled["spec"]["fallback"] == {"failureThreshold": 3, "replicas": 2}
    monitor = everything.get("PodMonitor", "fleet-llama")["metadata"]
    job = f'{{job="{monitor["namespace"]}/{monitor["name"]}"}}'
    wait, waiting = scaled["spec"]["triggers"]
    assert wait["metadata"]["query"] == f"max(vllm_omni_fleet:expected_wait_seconds{job})"
    assert (wait["metricType"], wait["metadata"]["threshold"]) == ("Value", "2")
    assert waiting["metadata"]["query"] == f"sum(vllm_omni_fleet:requests_waiting{job})"
    assert (waiting["metricType"], waiting["metadata"]["threshold"]) == ("AverageValue", "5")
    # Without heads the load is unknown, not zero.
    assert waiting["metadata"]["ignoreNullValues"] == "false"
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_gpus_are_requested_like_in_production_stack(everything: Manifests) -> None:
    (node,), (head,) = (everything.pod(*workload)["containers"] for workload in (NODE, HEADS[0]))
    assert node["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "64Gi"}
    assert node["resources"]["requests"] == {"cpu": "6", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in str(head["resources"])
    assert (node["image"], head["image"]) == ("registry/vllm:v1", "registry/vllm:v1-cpu")
    given = {"requests": {"example.com/chip": "4"}}
    other = render(values([MODEL | {"resources": given}]))
    assert other.pod(*NODE)["containers"][0]["resources"] == given
