"""What a head's metrics say of the load of a stage."""

from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_plugin.ray.scaler import Load

WAIT = "vllm_omni_fleet:expected_wait_seconds"
REPLICAS = "vllm_omni_fleet:replicas"
_TIMEOUT_S = 2.0


def read_load(url: str, stage: int) -> Load | None:
    """Ask a head for the load of a stage; None if it does not answer, or cannot tell the wait yet.

    Args:
        url: the head's address.
        stage: the stage.
    """
    try:
        # Directly, whatever proxy the environment names.
        with build_opener(ProxyHandler({})).open(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return load_of(answer.read().decode(), stage)
    except (OSError, HTTPException, ValueError):
        return None


def load_of(metrics: str, stage: int) -> Load | None:
    """The load of a stage in a scrape; None where the wait is missing.

    Raises:
        ValueError: it is no scrape.
    """
    lines = [line for line in metrics.splitlines(keepends=True) if line.startswith((f"{WAIT}{{", f"{REPLICAS}{{"))]
    samples = [
        sample
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
        if sample.labels.get("stage") == str(stage)
    ]
    waits = [sample.value for sample in samples if sample.name == WAIT]
    up = sum(sample.value for sample in samples if sample.name == REPLICAS and sample.labels.get("state") == "up")
    return Load(int(up), max(waits)) if waits else None
