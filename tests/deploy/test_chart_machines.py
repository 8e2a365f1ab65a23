"""The nodes of the chart as groups of LeaderWorkerSet: one replica over several machines."""

from typing import Any

import kubernetes_validate
import pytest
from helm_python.chart import lint
from helm_python.errors import HelmRenderError

from .chart import CHART, EVERYTHING, MACHINES, MODEL, STAGES, Manifests, render, values
from .flags import flags_of
from .test_chart import NODE

STAGES_OF_TWO = STAGES["modelSpec"][0]["stages"]
GROUPS = ("LeaderWorkerSet", "fleet-llama-node")
FIELDS = {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
FIELDS_OF_TEMPLATE = {"size", "restartPolicy", "workerTemplate", "volumeClaimTemplates"}
"""Those of LeaderWorkerSet's API, leaderworkerset.x-k8s.io/v1, that the chart may set."""


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render(values(**MACHINES))


@pytest.fixture(scope="module")
def groups(manifests: Manifests) -> dict[str, Any]:
    found: dict[str, Any] = manifests.get(*GROUPS)
    return found


def test_helms_linter_accepts_the_chart() -> None:
    assert lint(CHART, values(**MACHINES), strict=True)["errors"] == []


def test_the_groups_have_the_fields_of_their_api_and_pods_that_match_kubernetes_schema(groups: dict[str, Any]) -> None:
    assert groups["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert groups["spec"].keys() <= FIELDS
    template = groups["spec"]["leaderWorkerTemplate"]
    assert template.keys() <= FIELDS_OF_TEMPLATE
    pods = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "pods"},
        "template": template["workerTemplate"],
    }
    kubernetes_validate.validate(pods, "1.37", strict=True)
    (claim,) = template["volumeClaimTemplates"]
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim, "1.37", strict=True)


def test_the_machines_of_a_group_are_those_of_one_replica_and_start_together(groups: dict[str, Any]) -> None:
    template = groups["spec"]["leaderWorkerTemplate"]
    assert (groups["spec"]["startupPolicy"], template["restartPolicy"], template["size"]) == (
        "LeaderCreated",
        "None",
        4,
    )
    (container,) = template["workerTemplate"]["spec"]["containers"]
    flags = flags_of(["vllm", "serve", *container["args"]])
    assert {name: flags[name] for name in ("--nnodes", "--node-rank", "--master-addr", "--omni-dp-size-local")} == {
        "--nnodes": "4",
        # Kubernetes puts in the variables, which LeaderWorkerSet sets.
        "--node-rank": "$(LWS_WORKER_INDEX)",
        "--master-addr": "$(LWS_LEADER_ADDRESS)",
        "--omni-dp-size-local": "1",
    }


def test_all_else_of_a_pod_is_as_in_nodes_of_one_machine(groups: dict[str, Any]) -> None:
    alone = render(values(**EVERYTHING)).get(*NODE)["spec"]["template"]
    together = groups["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    (of_alone,), (of_together,) = (pod["spec"]["containers"] for pod in (alone, together))
    more = of_together["args"][len(of_alone["args"]) :]
    assert more[::2] == ["--nnodes", "--node-rank", "--master-addr"]
    of_together["args"] = of_alone["args"]
    assert together == alone


def test_keda_scales_the_groups(manifests: Manifests) -> None:
    target = manifests.get("ScaledObject", GROUPS[1])["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": GROUPS[0], "name": GROUPS[1]}


def test_machines_reach_each_other_at_any_port(manifests: Manifests) -> None:
    among = manifests.get("NetworkPolicy", GROUPS[1])["spec"]["ingress"][1]
    assert "ports" not in among
    assert among["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"


@pytest.mark.parametrize("more", [{"nodeSpec": {"machines": 2, "replicasPerPod": 2}}, {"stages": STAGES_OF_TWO}])
def test_several_replicas_in_each_pod_and_pipelines_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(HelmRenderError, match=r"machines above 1 needs nodeSpec\.replicasPerPod 1, and no stages"):
        render(values([MODEL | {"nodeSpec": {"machines": 2}} | more]))
