"""The table of leases."""

from vllm_omni_plugin.replicas.control.leases import Leases


def granted(leases: Leases, name: str) -> int:
    """Grant a lease; returns the slot, or -1."""
    lease = leases.grant(name.encode(), name, 0.0)
    return -1 if lease is None else lease.slot


def test_a_slot_is_free_only_after_its_cleanup() -> None:
    leases = Leases(1, 10.0)
    granted(leases, "a")
    assert leases.end(leases.current[0])
    assert granted(leases, "b") == -1
    leases.free(0)
    assert granted(leases, "b") == 0


def test_leases_are_extended_by_the_delay_of_the_server() -> None:
    leases = Leases(1, 10.0)
    granted(leases, "a")
    assert leases.expired(12.0, late_by=5.0) == []
    assert leases.expired(14.9) == []
    assert leases.expired(15.0) == leases.current
