"""Reads a histogram of prometheus_client."""

from prometheus_client import Histogram


def observed(histogram: Histogram) -> tuple[float, float]:
    """Count and sum of a histogram without further labels."""
    (family,) = histogram.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return values["count"], values["sum"]
