"""The values that the chart accepts and refuses."""

import re
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError, HelmRenderError

from tests.project.source_tree import ROOT
from vllm_omni_plugin.admin.metrics.catalogue import BY_NAME

from .chart import CHART, MODEL, RUST, SECRET, Manifests, render, values
from .flags import flags_of

STAGE: dict[str, Any] = {"name": "a", "pipeline": {"output": "text", "final": True}}


def given(**of_model: Any) -> dict[str, Any]:
    return values([MODEL | of_model])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        pytest.param(given(raySpec={"enabled": True}), "raySpec", id="not in this chart"),
        pytest.param(given(vllmConfig={"maxModelLength": 4096}), "maxModelLength", id="misspelled"),
        pytest.param(given(vllmConfig={"maxModelLen": "long"}), "maxModelLen", id="wrong type"),
        pytest.param(given(headSpec={"replicaCount": 0}), "replicaCount", id="no head"),
        pytest.param(given(nodeSpec={"ports": "20000"}), "ports", id="no range"),
        pytest.param(given(keda={"maxReplicas": 3}), "maxReplicas", id="not KEDA's name"),
        pytest.param(given(name="LLaMA 3"), "name", id="no name of Kubernetes"),
        pytest.param(values([{"name": "llama"}]), "modelURL", id="no model"),
        pytest.param(given(stages=[{"name": "a", "pipeline": {}}]), "output", id="stage without output"),
        pytest.param(given(stages=[STAGE | {"name": "Pre_fill"}]), "name", id="no stage's name"),
        pytest.param(given(stages=[STAGE | {"modelURL": "b"}]), "modelURL", id="misplaced in a stage"),
        pytest.param(given(stages=[STAGE | {"vllmConfig": {"dtype": "half"}}]), "dtype", id="of heads, too"),
        pytest.param(given(stages=[STAGE | {"pipeline": {"output": "text", "id": 3}}]), "id", id="the chart's"),
        pytest.param(values(fleetSecret="short"), "fleetSecret", id="short secret"),
        pytest.param(values(fleetSecret=None), "fleetSecret", id="no secret"),
        pytest.param(values(adminKey={"secretName": "x"}), "adminKey", id="half a secret"),
        pytest.param(values(routerSpec={}), "routerSpec", id="misplaced"),
    ],
)
def test_an_invalid_value_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        render(wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        pytest.param(
            values([MODEL, MODEL]),
            "modelSpec llama: the objects of another model are called fleet-llama, too",
            id="two models of a name",
        ),
        pytest.param(
            given(stages=[STAGE, STAGE]),
            "modelSpec llama: stages: the name a is given twice",
            id="two stages of a name",
        ),
        pytest.param(
            given(keda={"enabled": True, "minReplicaCount": 9}),
            "modelSpec llama: keda.minReplicaCount 9 is above maxReplicaCount 8",
            id="a minimum above the maximum",
        ),
        pytest.param(
            given(nodeSpec={"ports": "20199-20000"}),
            "modelSpec llama: nodeSpec.ports 20199-20000",
            id="from last to first",
        ),
        pytest.param(
            given(nodeSpec={"ports": "20000-20009", "replicasPerPod": 2}, headSpec={"replicaCount": 3}, requestGPU=2),
            "llama: nodeSpec.ports 20000-20009: nodeSpec.replicasPerPod 2 and headSpec.replicaCount 3 need 18 ports",
            id="too few ports",
        ),
        pytest.param(
            given(nodeSpec={"ports": "20000-20005"}, headSpec={"replicaCount": 2}),
            "headSpec.replicaCount 2 need 7 ports",
            id="none for the head that an update starts before it ends an old one",
        ),
        pytest.param(
            given(vllmConfig={"tensorParallelSize": 4}),
            "modelSpec llama: vllmConfig.tensorParallelSize 4 needs more devices than requestGPU 1",
            id="too few devices",
        ),
        pytest.param(
            given(requestGPU="2", nodeSpec={"machines": 2}, vllmConfig={"tensorParallelSize": 8}),
            "tensorParallelSize 8 needs more devices than requestGPU 2",
            id="too few devices of all machines",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmRenderError, match=named):
        render(wrong)


def test_models_whose_objects_would_have_one_name_are_refused() -> None:
    """Names of objects are cut, since labels may have 63 characters."""
    models = [MODEL | {"name": f"llama-3-3-70b-instruct-{kind}"} for kind in ("fp8", "bf16")]
    with pytest.raises(HelmRenderError, match="-bf16: the objects of another model are called inference-prod"):
        render(values(models), "inference-production")
    assert render(values(models), "inference").names()


@pytest.mark.parametrize(
    ("of_model", "other", "name"),
    [
        pytest.param({}, "llama-nodes", "fleet-llama-nodes", id="Service of nodes"),
        pytest.param({}, "llama-fleet", "fleet-llama-fleet", id="Service of the coordinator"),
        pytest.param({"nodeSpec": {"machines": 2}}, "llama-node", "fleet-llama-node", id="Service of LeaderWorkerSet"),
        pytest.param({"stages": [STAGE | {"name": "node"}]}, "llama-node", "fleet-llama-node-node", id="StatefulSet"),
        pytest.param({"stages": [STAGE | {"name": "head"}]}, "llama-node", "fleet-llama-node-head", id="NetworkPolicy"),
    ],
)
def test_a_model_is_refused_whose_object_has_the_name_of_another_models(
    of_model: dict[str, Any], other: str, name: str
) -> None:
    models = [MODEL | of_model, MODEL | {"name": other}]
    for pair in (models, models[::-1]):
        with pytest.raises(HelmRenderError, match=f"{name}, too: choose another name"):
            render(values(pair))


def test_models_with_the_names_of_objects_of_other_kinds_are_accepted() -> None:
    manifests = render(
        values([MODEL | {"name": name} for name in ("llama", "llama-node", "llama-head", "llama-heads")])
    )
    assert len(set(manifests.names())) == len(manifests.names())


QWEN = MODEL | {"name": "qwen", "hf_token": "token"}


@pytest.mark.parametrize(
    ("changed", "restarted"),
    [
        pytest.param({"modelSpec": [MODEL, QWEN | {"hf_token": "another"}]}, ["qwen"], id="a model's token"),
        pytest.param({"modelSpec": [MODEL, QWEN, QWEN | {"name": "new"}]}, [], id="a new model's token"),
        pytest.param({"fleetSecret": "another secret of all"}, ["llama", "qwen"], id="of all models"),
    ],
)
def test_another_secret_restarts_the_pods_that_use_it(changed: dict[str, Any], restarted: list[str]) -> None:
    before = {"fleetSecret": SECRET, "modelSpec": [MODEL, QWEN]}
    one, two = (render({"servingEngineSpec": each}) for each in (before, before | changed))
    for kind, part in (("Deployment", "head"), ("Deployment", "heads"), ("StatefulSet", "node")):
        differing = [
            name
            for name in ("llama", "qwen")
            if one.annotation(kind, f"fleet-{name}-{part}") != two.annotation(kind, f"fleet-{name}-{part}")
        ]
        assert differing == restarted


@pytest.mark.parametrize(
    "fitting",
    [
        given(requestGPU=0, vllmConfig={"tensorParallelSize": 2}),
        given(resources={"limits": {"nvidia.com/gpu": 4}}, vllmConfig={"tensorParallelSize": 4}),
        given(requestGPU=2, nodeSpec={"machines": 2}, vllmConfig={"tensorParallelSize": 4}),
        given(nodeSpec={"ports": "20000-20006"}, headSpec={"replicaCount": 2}),
        given(nodeSpec={"ports": "20000-20002"}, headSpec={"replicaCount": 1}),
    ],
)
def test_values_that_just_fit_are_accepted(fitting: dict[str, Any]) -> None:
    assert render(fitting).names()


@pytest.mark.parametrize(
    ("own", "image"),
    [
        pytest.param({}, "registry/vllm:v1", id="the model's"),
        pytest.param({"tag": "v1-cpu"}, "registry/vllm:v1-cpu", id="another tag"),
        pytest.param({"repository": "registry/small"}, "registry/small:v1", id="another repository"),
    ],
)
def test_heads_start_without_a_gpu_whatever_build_of_vllm_is_in_their_image(own: dict[str, Any], image: str) -> None:
    manifests = render(given(headSpec=own))
    (head,) = manifests.pod("Deployment", "fleet-llama-head")["containers"]
    (node,) = manifests.pod("StatefulSet", "fleet-llama-node")["containers"]
    assert (head["image"], node["image"]) == (image, "registry/vllm:v1")
    cpu = {"name": "VLLM_TARGET_DEVICE", "value": "cpu"}
    assert [cpu in container["env"] for container in (head, node)] == [True, False]


def test_the_sample_of_the_values_renders() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    sample = "\n".join(line.replace("  # ", "", 1) for line in lines if line.startswith(("  # - ", "  #   ")))
    (model,) = yaml.safe_load(sample)
    assert "Deployment/fleet-llama-head" in render(values([model])).names()


def test_a_models_values_override_the_defaults() -> None:
    models = [MODEL | {"vllmConfig": {"dtype": "float16"}}, MODEL | {"name": "qwen"}]
    manifests = render(values(models, modelDefaults={"replicaCount": 4, "vllmConfig": {"dtype": "bfloat16"}}))
    for name, dtype in (("llama", "float16"), ("qwen", "bfloat16")):
        assert manifests.get("StatefulSet", f"fleet-{name}-node")["spec"]["replicas"] == 4
        assert dtype in manifests.command("StatefulSet", f"fleet-{name}-node")


@pytest.mark.parametrize(("own", "seconds"), [({}, 10), ({"timeoutSeconds": 20}, 20)])
def test_how_long_a_nodes_probe_may_take_is_a_value(own: dict[str, Any], seconds: int) -> None:
    manifests = render(given(nodeSpec={"startupProbe": own, "readinessProbe": own}))
    (node,) = manifests.pod("StatefulSet", "fleet-llama-node")["containers"]
    assert [node[f"{kind}Probe"]["timeoutSeconds"] for kind in ("startup", "readiness")] == [seconds] * 2


def test_every_default_is_in_the_schema() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert render(defaults).names() == render({}).names()


def test_scaling_queries_use_existing_metrics() -> None:
    queries = (CHART / "templates" / "scaling.yaml").read_text()
    asked = set(re.findall(r"vllm_omni_fleet:(\w+)", queries))
    assert {"expected_wait_seconds", "requests_waiting"} <= asked <= set(BY_NAME)


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
