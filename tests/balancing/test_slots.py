"""Slots are small, stay with their replica, and are given again."""

from vllm_omni_plugin.balancing.slots import ReplicaSlots, block_size_of

from .fakes import FakeReplica, with_queues
from .pool import pool_of


def test_a_replica_keeps_its_slot_while_it_does_not_serve() -> None:
    slots, (one, two, three) = ReplicaSlots(), with_queues(0, 0, 0)
    assert slots.membership((one, two)).slots == [0, 1]
    assert slots.membership((two,)).positions == {1: 0}
    assert slots.membership((three, one, two)).slots == [2, 0, 1]
    assert slots.membership((three, one)).mask == 0b101


def test_the_slot_of_a_forgotten_replica_is_given_again() -> None:
    slots, (one, two, three) = ReplicaSlots(), with_queues(0, 0, 0)
    slots.membership((one, two))
    assert (slots.free(one), slots.free(one)) == (0, None)
    assert slots.slot(three) == 0
    assert slots.membership((one, two)).slots == [2, 1]


def test_a_list_that_changed_in_place_is_seen() -> None:
    slots, replicas = ReplicaSlots(), list(with_queues(0, 0))
    slots.membership(replicas)
    replicas.reverse()
    assert slots.membership(replicas).slots == [1, 0]


def test_a_replica_that_says_no_block_size_has_the_default() -> None:
    silent, talkative = FakeReplica("tcp://a"), pool_of(None, 1, block_size=128).replicas[0]
    assert (block_size_of(silent), block_size_of(talkative)) == (16, 128)
    assert ReplicaSlots().membership((silent, talkative)).block_sizes == {16, 128}
