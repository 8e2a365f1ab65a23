"""The random policy."""

import random
from collections import Counter

from vllm_omni_plugin.balancing import LoadBalancer, RandomBalancer

from .fakes import with_queues


def test_every_replica_is_picked_equally_often_whatever_its_load() -> None:
    balancer = RandomBalancer(random.Random(1))
    picks = Counter(balancer.select({}, with_queues(0, 7, 1000)) for _ in range(3000))
    # Three standard deviations around 1,000; the seed makes the counts the same in every run.
    assert all(920 <= picks[index] <= 1080 for index in range(3)), picks
    assert picks.total() == 3000


def test_is_a_load_balancer() -> None:
    assert isinstance(RandomBalancer(), LoadBalancer)
