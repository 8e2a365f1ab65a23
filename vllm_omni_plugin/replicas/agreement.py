"""Whether a head and a replica run the same thing, so that an answer does not depend on who computes it."""

from collections.abc import Mapping

_NOTHING = "nothing"


def differences(head: Mapping[str, str], replica: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints (`vllm_api.fingerprint`), sorted, each with the field and both values."""
    return [
        f"{name}: head has {head.get(name, _NOTHING)}, replica {replica.get(name, _NOTHING)}"
        for name in sorted(head.keys() | replica.keys())
        if head.get(name) != replica.get(name)
    ]
