"""The Helm chart, rendered by Helm's own engine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from helm_python.chart import Chart

from tests.project.source_tree import ROOT

CHART = ROOT / "deploy" / "helm"
RELEASE = "fleet"
NAMESPACE = "prod"
SECRET = "0123456789abcdef0123"
MODEL: dict[str, Any] = {
    "name": "llama",
    "repository": "registry/vllm",
    "tag": "v1",
    "modelURL": "org/llama",
}
EVERYTHING: dict[str, Any] = {
    "adminKey": {"secretName": "ours", "secretKey": "admin"},
    "vllmApiKey": "sk-of-clients",
    "podMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
    "networkPolicy": {"ingressFrom": [{"namespaceSelector": {}}]},
    "securityContext": {"runAsUser": 1000, "runAsNonRoot": True},
    "containerSecurityContext": {"allowPrivilegeEscalation": False},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "modelSpec": [
        MODEL
        | {
            "replicaCount": 3,
            "requestGPU": 2,
            "limitMemory": "64Gi",
            "pvcStorage": "50Gi",
            "storageClass": "fast",
            "runtimeClassName": "nvidia",
            "priorityClassName": "high",
            "serviceAccountName": "llama",
            "imagePullSecret": "registry",
            "annotations": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "hf_token": "hf_of_ours",
            "env": [{"name": "A", "value": "b"}],
            "envFromSecret": {"name": "s3"},
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}],
            "tolerations": [{"key": "llama", "operator": "Exists"}],
            "chatTemplate": "{% for m in messages %}{{ m }}\n{% endfor %}",
            "enableLoRA": True,
            "vllmConfig": {
                "enablePrefixCaching": False,
                "enableChunkedPrefill": True,
                # Helm reads numbers as floats, and would write this one as 1.048576e+06.
                "maxModelLen": 1048576,
                "dtype": "bfloat16",
                "tensorParallelSize": 2,
                "maxNumSeqs": 32,
                "maxLoras": 4,
                "gpuMemoryUtilization": 0.9,
                "runner": "generate",
                "convert": "none",
                "extraArgs": ["--seed", "3"],
            },
            "headSpec": {"replicaCount": 3, "tag": "v1-cpu", "routingOptions": {"overlap_weight": 2}},
            "keda": {"enabled": True, "fallback": {"failureThreshold": 3, "replicas": 2}},
        },
        MODEL | {"name": "qwen", "modelURL": "org/qwen", "hf_token": {"secretName": "ours", "secretKey": "hf"}},
        MODEL | {"name": "off", "enabled": False},
    ],
}
"""All values that change a manifest."""
RUST = EVERYTHING | {"modelSpec": [MODEL | {"headSpec": {"rustFrontend": True}}]}
"""Heads with vLLM's Rust front end."""
STAGES: dict[str, Any] = EVERYTHING | {
    "modelSpec": [
        EVERYTHING["modelSpec"][0]
        | {
            "stages": [
                {
                    "name": "prefill",
                    "replicaCount": 3,
                    "pipeline": {"output": "kv_cache", "engine_args": {"max-num-batched-tokens": 1048576}},
                    "keda": {"enabled": False},
                },
                {
                    "name": "decode",
                    "requestGPU": 4,
                    "runtimeClassName": "nvidia-fast",
                    "vllmConfig": {"tensorParallelSize": 4, "maxNumSeqs": 256},
                    "nodeSpec": {"ports": "21000-21199", "extraArgs": ["--block-size", "32"]},
                    "pipeline": {
                        "inputs": ["prefill"],
                        "output": "text",
                        "final": True,
                        "policy": "least-tokens",
                    },
                },
            ],
        },
    ]
}
"""Prefill and decode with nodes of their own."""
MACHINES = EVERYTHING | {"modelSpec": [EVERYTHING["modelSpec"][0] | {"nodeSpec": {"machines": 4}}]}
"""Replicas of four machines each."""


def values(models: Sequence[dict[str, Any]] = (MODEL,), **spec: Any) -> dict[str, Any]:
    return {"servingEngineSpec": {"fleetSecret": SECRET, "modelSpec": list(models), **spec}}


class _Loader(yaml.SafeLoader):
    """Refuses keys that occur twice, as readers of manifests do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{sorted(keys)} in line {node.start_mark.line + 1}"
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Manifests:
    objects: Sequence[dict[str, Any]]

    def names(self) -> list[str]:
        return sorted(f"{found['kind']}/{found['metadata']['name']}" for found in self.objects)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = (found for found in self.objects if (found["kind"], found["metadata"]["name"]) == (kind, name))
        return found

    def pod(self, kind: str, name: str) -> dict[str, Any]:
        spec: dict[str, Any] = self.get(kind, name)["spec"]["template"]["spec"]
        return spec

    def annotation(self, kind: str, name: str, key: str = "checksum/secrets") -> str:
        """Of the pods of a workload."""
        annotations: dict[str, str] = self.get(kind, name)["spec"]["template"]["metadata"]["annotations"]
        return annotations[key]

    def command(self, kind: str, name: str) -> list[str]:
        (container,) = self.pod(kind, name)["containers"]
        # The image's entry point runs `vllm serve`.
        return ["vllm", "serve", *container["args"]]


def render(given: dict[str, Any], release: str = RELEASE) -> Manifests:
    """Render the chart.

    Raises:
        HelmRenderError, HelmValuesError: Helm refuses it.
    """
    return _render(json.dumps(given, sort_keys=True), release)


@cache
def _render(given: str, release: str) -> Manifests:
    with Chart.load(CHART) as chart:
        chart.validate_schema(json.loads(given))
        rendered = chart.render(json.loads(given), name=release, namespace=NAMESPACE)
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return Manifests([found for text in texts for found in yaml.load_all(text, _Loader) if found])
