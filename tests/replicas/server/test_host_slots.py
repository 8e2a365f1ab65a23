"""Where a replica stands on its machine, by which it keeps its number."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.replicas.replica_server import host_slots
from vllm_omni_plugin.replicas.replica_server.host_slots import HostSlots

TAKE = f"""
import sys
from {HostSlots.__module__} import HostSlots
print(*HostSlots(2, "10.0.0.1", "tcp://head:1").names, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests and nodes run on this machine."""
    monkeypatch.setattr(host_slots, "SOCKET", f"{host_slots.SOCKET}-test-{os.getpid()}")
    monkeypatch.setattr(socket, "gethostname", lambda: "node")


@pytest.fixture
def first() -> Iterator[HostSlots]:
    with HostSlots(2, "10.0.0.1", "tcp://head:1") as slots:
        yield slots


def test_nodes_of_one_machine_have_slots_of_their_own_and_get_those_of_ended_ones(first: HostSlots) -> None:
    with HostSlots(1, "10.0.0.1", "tcp://head:1") as second:
        assert [*first.names, *second.names] == ["node/10.0.0.1/0", "node/10.0.0.1/1", "node/10.0.0.1/2"]
        first.close()
        with HostSlots(3, "10.0.0.1", "tcp://head:1") as third:
            assert third.names == ("node/10.0.0.1/0", "node/10.0.0.1/1", "node/10.0.0.1/3")


def test_machines_with_the_same_hostname_have_other_names(first: HostSlots) -> None:
    with HostSlots(2, "10.0.0.2", "tcp://head:1") as second:
        assert set(first.names).isdisjoint(second.names)


def test_nodes_of_another_fleet_on_this_machine_shift_no_slot(first: HostSlots) -> None:
    with HostSlots(2, "10.0.0.1", "tcp://head:2") as second:
        assert second.names == first.names
        numbers = {identity.number for slots in (first, second) for identity in slots.identities(())}
        assert len(numbers) == 4


def test_a_killed_process_leaves_its_slots() -> None:
    names = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            names.append(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
    assert names[0] == names[1] != ""


def test_child_processes_do_not_keep_slots(first: HostSlots) -> None:
    # With the descriptors that a child gets if nobody closes them.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        first.close()
        with HostSlots(2, "10.0.0.1", "tcp://head:1") as second:
            assert second.names == first.names


def test_a_machine_without_enough_free_slots_is_an_error_and_none_stays_taken(
    first: HostSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_slots, "MOST_SLOTS", 4)
    with pytest.raises(ConfigError, match="3 replicas are too many: this machine can run 2 more"):
        HostSlots(3, "10.0.0.1", "tcp://head:1")
    with HostSlots(2, "10.0.0.1", "tcp://head:1") as rest:
        assert rest.names == ("node/10.0.0.1/2", "node/10.0.0.1/3")


def test_replicas_have_the_numbers_that_the_head_gave_them(first: HostSlots) -> None:
    identities = first.identities((7, 3))
    assert [(each.number, each.host_slot) for each in identities] == [(7, first.names[0]), (3, first.names[1])]


def test_without_a_head_numbers_of_one_machine_differ_are_kept_and_are_above_those_of_heads() -> None:
    found = []
    for _ in range(2):
        with HostSlots(20, "10.0.0.1", "tcp://head:1") as one, HostSlots(20, "10.0.0.1", "tcp://head:1") as other:
            found.append([identity.number for slots in (one, other) for identity in slots.identities(())])
    assert len(set(found[0])) == 40
    assert found[0] == found[1]
    # Of these, NIXL's port is below those that the system takes itself.
    assert all(number >= 1024 and 5600 + number < 32_768 for number in found[0])


def test_without_a_head_machines_have_other_numbers_for_the_same_slots(first: HostSlots) -> None:
    first.close()
    with HostSlots(2, "10.0.0.2", "tcp://head:1") as second:
        numbers = {identity.number for slots in (first, second) for identity in slots.identities(())}
    assert len(numbers) == 4
