"""What a histogram of prometheus_client has counted."""

from prometheus_client import Histogram


def observed(histogram: Histogram) -> tuple[float, float]:
    """How many values one without further labels has observed, and their sum."""
    (family,) = histogram.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return values["count"], values["sum"]
