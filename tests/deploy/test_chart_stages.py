"""A model of the Helm chart that is a pipeline: each stage has nodes of its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni_plugin.pipeline import Pipeline, load_pipeline

from .chart import CHART, MODEL, STAGES, Manifests, render, values
from .flags import flags_of

HEADS = [("Deployment", "fleet-llama-head"), ("Deployment", "fleet-llama-heads")]
PREFILL, DECODE = ("StatefulSet", "fleet-llama-node-prefill"), ("StatefulSet", "fleet-llama-node-decode")
NODES = [PREFILL, DECODE]
CONFIG = ("ConfigMap", "fleet-llama-pipeline")


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render(values(**STAGES))


def pipeline(manifests: Manifests, folder: Path) -> Pipeline:
    (folder / "pipeline.yaml").write_text(manifests.get(*CONFIG)["data"]["pipeline.yaml"])
    return load_pipeline(folder / "pipeline.yaml")


def test_each_stage_has_a_set_of_nodes_with_what_belongs_to_it(manifests: Manifests) -> None:
    names = manifests.names()
    for kind in ("StatefulSet", "PodDisruptionBudget", "NetworkPolicy"):
        assert [name for name in names if name.startswith(f"{kind}/fleet-llama-node")] == [
            f"{kind}/fleet-llama-node-decode",
            f"{kind}/fleet-llama-node-prefill",
        ]
    (scaled,) = [name for name in names if name.startswith("ScaledObject")]
    assert scaled == "ScaledObject/fleet-llama-node-decode"


def test_the_file_has_the_stages_and_no_replicas_of_heads(manifests: Manifests, tmp_path: Path) -> None:
    prefill, decode = pipeline(manifests, tmp_path).stages
    assert (prefill.id, prefill.name, prefill.model, prefill.replicas) == (0, "prefill", "org/llama", 0)
    assert prefill.engine_args == {"max_num_batched_tokens": 1048576}
    assert (decode.id, decode.inputs, decode.final, decode.replicas) == (1, ("prefill",), True, 0)
    # Those of the heads, unless the stage has its own.
    assert (prefill.policy, prefill.policy_config) == ("prefix", {"overlap_weight": 2})
    assert (decode.policy, decode.policy_config) == ("least-tokens", {})


def test_heads_and_nodes_read_the_file_in_place_of_a_model(manifests: Manifests) -> None:
    for workload in (*HEADS, *NODES):
        command = manifests.command(*workload)
        assert command[:3] == ["vllm", "serve", "--omni-pipeline"]
        (container,) = manifests.pod(*workload)["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in manifests.pod(*workload)["volumes"]}
        assert command[3] == f"{mounts['pipeline']}/pipeline.yaml"
        assert volumes["pipeline"]["configMap"]["name"] == CONFIG[1]
        assert not {"--omni-lb-policy", "--omni-lb-config"} & flags_of(command).keys()


def test_nodes_of_a_stage_have_its_number_replicas_devices_and_arguments(manifests: Manifests) -> None:
    given = [
        (
            manifests.get(*node)["spec"].get("replicas"),
            manifests.pod(*node)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"],
            manifests.pod(*node)["runtimeClassName"],
            {name: flags_of(manifests.command(*node)).get(name) for name in ("--omni-stage-id", *OF_NODES)},
        )
        for node in NODES
    ]
    assert given == [
        (3, "2", "nvidia", dict(zip(("--omni-stage-id", *OF_NODES), ("0", "2", "32", None), strict=True))),
        # KEDA sets the number.
        (None, "4", "nvidia-fast", dict(zip(("--omni-stage-id", *OF_NODES), ("1", "4", "256", "32"), strict=True))),
    ]


OF_NODES = ("--tensor-parallel-size", "--max-num-seqs", "--block-size")


def test_pods_are_selected_by_their_stage(manifests: Manifests) -> None:
    labels = [manifests.get(*node)["spec"]["template"]["metadata"]["labels"].items() for node in NODES]
    for number, (_, name) in enumerate(NODES):
        for selector in (
            manifests.get("StatefulSet", name)["spec"]["selector"]["matchLabels"],
            manifests.get("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
            manifests.get("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
        ):
            assert [selector.items() <= of_pod for of_pod in labels] == [number == 0, number == 1]
    # All have DNS names.
    service = manifests.get("Service", "fleet-llama-nodes")["spec"]["selector"].items()
    assert all(service <= of_pod for of_pod in labels)


def test_nodes_reach_each_other_to_transfer_caches(manifests: Manifests) -> None:
    for node, ports in zip(NODES, ({"port": 20000, "endPort": 20199}, {"port": 21000, "endPort": 21199}), strict=True):
        of_heads, of_nodes = manifests.get("NetworkPolicy", node[1])["spec"]["ingress"]
        assert of_heads["ports"] == [ports]
        assert "ports" not in of_nodes
        (peer,) = of_nodes["from"]
        labels = peer["podSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == "node"
        assert "vllm-omni/stage" not in labels


def test_a_stage_is_scaled_by_its_own_load(manifests: Manifests) -> None:
    scaled = manifests.get("ScaledObject", DECODE[1])["spec"]
    assert scaled["scaleTargetRef"]["name"] == DECODE[1]
    for trigger in scaled["triggers"]:
        assert '{job="prod/fleet-llama",stage="1"}' in trigger["metadata"]["query"]


def test_another_file_restarts_the_pods(manifests: Manifests) -> None:
    model = STAGES["modelSpec"][0]
    prefill = model["stages"][0] | {"pipeline": {"output": "kv_cache", "min_prompt_tokens": 5}}
    other = render(values(**STAGES | {"modelSpec": [model | {"stages": [prefill, model["stages"][1]]}]}))
    for workload in (*HEADS, *NODES):
        one, two = (each.get(*workload)["spec"]["template"]["metadata"]["annotations"] for each in (manifests, other))
        assert one["checksum/pipeline"] != two["checksum/pipeline"]


def test_names_are_short_enough_for_a_statefulset() -> None:
    stages = [stage | {"name": name * 20} for stage, name in zip(STAGES["modelSpec"][0]["stages"], "ab", strict=True)]
    stages[1] = stages[1] | {"pipeline": stages[1]["pipeline"] | {"inputs": ["a" * 20]}}
    found = render(values([MODEL | {"name": "m" * 30, "stages": stages}])).names()
    names = {name.partition("/")[2] for name in found if name.startswith("StatefulSet")}
    assert len(names) == 2
    assert all(len(name) <= 52 for name in names)


def test_the_sample_of_the_values_is_a_pipeline(tmp_path: Path) -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    sample = "\n".join(line.replace("    # ", "", 1) for line in lines if line.startswith(("    # - ", "    #   ")))
    stages: list[dict[str, Any]] = yaml.safe_load(sample)
    sample_manifests = render(values([MODEL | {"stages": stages}]))
    assert [stage.name for stage in pipeline(sample_manifests, tmp_path).stages] == ["prefill", "decode"]
    assert [sample_manifests.get(*node)["spec"]["replicas"] for node in NODES] == [2, 4]
