"""The table of leases."""

from vllm_omni_plugin.replicas.control.leases import Leases


def granted(leases: Leases, name: str) -> int:
    """The slot that a head gets; its connection is called as it is."""
    lease = leases.grant(name.encode(), name, 0.0)
    return -1 if lease is None else lease.slot


def test_a_slot_is_free_again_only_when_cleaned() -> None:
    leases = Leases(1, 10.0)
    granted(leases, "a")
    assert leases.end(leases.current[0])
    assert granted(leases, "b") == -1
    leases.free(0)
    assert granted(leases, "b") == 0


def test_a_lease_number_is_never_used_twice() -> None:
    leases = Leases(1, 10.0)
    numbers = []
    for _ in range(3):
        granted(leases, "a")
        lease = leases.current[0]
        numbers.append(lease.lease_id)
        leases.end(lease)
        leases.free_all()
    assert len(set(numbers)) == 3


def test_a_server_that_was_late_itself_gives_heads_as_much_more_time() -> None:
    leases = Leases(1, 10.0)
    granted(leases, "a")
    assert leases.expired(12.0, late_by=5.0) == []
    assert leases.expired(14.9) == []
    assert leases.expired(15.0) == leases.current
