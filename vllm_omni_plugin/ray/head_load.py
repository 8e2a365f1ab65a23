"""What a head's metrics say of the load of a stage."""

import math
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_plugin.errors import ServerUnavailableError
from vllm_omni_plugin.ray.scaler import Load

WAIT = "vllm_omni_fleet:expected_wait_seconds"
REPLICAS = "vllm_omni_fleet:replicas"
_TIMEOUT_S = 2.0


def read_load(url: str, stage: int) -> Load:
    """Ask a head for the load of a stage.

    Args:
        url: the head's address.
        stage: the stage.

    Raises:
        ServerUnavailableError: it does not answer, or cannot tell the wait yet.
    """
    try:
        # Directly, whatever proxy the environment names.
        with build_opener(ProxyHandler({})).open(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return load_of(answer.read().decode(), stage)
    except (OSError, HTTPException, ValueError) as error:
        raise ServerUnavailableError(f"{url} does not tell the wait: {error}") from error


def load_of(metrics: str, stage: int) -> Load:
    """The load of a stage in a scrape.

    Raises:
        ValueError: it is no scrape, or has no wait of this stage.
    """
    lines = [line for line in metrics.splitlines(keepends=True) if line.startswith((f"{WAIT}{{", f"{REPLICAS}{{"))]
    samples = [
        sample
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
        if sample.labels.get("stage") == str(stage)
    ]
    waits = [sample.value for sample in samples if sample.name == WAIT]
    if not waits or not all(math.isfinite(sample.value) for sample in samples):
        raise ValueError(f"its metrics have none of stage {stage}")
    up = sum(sample.value for sample in samples if sample.name == REPLICAS and sample.labels.get("state") == "up")
    return Load(int(up), max(waits))
