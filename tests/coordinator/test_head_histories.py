"""Whatever is lost and in whatever order it comes: a head never sees a wrong list, and in the end the right one."""

from coordinator_support import make_event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_fleet import MemoryFleet, numbers, rows

from vllm_omni_plugin.coordinator import ReplicaStatus, ReplicaWork, engine_key

GENERATIONS = {"h1": "old", "h2": "old", "h3": "new", "h4": "new"}
heads = st.sampled_from(sorted(GENERATIONS))
replicas = st.sampled_from(["a", "b", "c", "d"])


class HeadHistories(RuleBasedStateMachine):
    """Replicas come, change and go; heads come, are cut off and vanish; queues fill; the coordinator starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = MemoryFleet()
        self.announced: dict[str, ReplicaStatus] = {}

    @initialize()
    def begin(self) -> None:
        for name, generation in GENERATIONS.items():
            self.fleet.connect(name, generation)
        self.fleet.settle()

    @rule(name=replicas, status=st.sampled_from(ReplicaStatus), incarnation=st.integers(0, 2))
    def announce(self, name: str, status: ReplicaStatus, incarnation: int) -> None:
        self.announced[name] = status
        self.fleet.announce(make_event(name, stage_id=len(name), status=status, incarnation=incarnation))

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 1.0, 3.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.fleet.tick(seconds)

    @rule(name=heads, how=st.sampled_from(["connect", "vanish", "leave"]))
    def come_or_go(self, name: str, how: str) -> None:
        if how == "connect" or name not in self.fleet.heads:
            self.fleet.connect(name, GENERATIONS[name])
            return
        if how == "leave":
            self.fleet.heads[name].session.leave()
            self.fleet.exchange(name)
        del self.fleet.heads[name]

    @rule(name=heads, replica=replicas, requests=st.integers(0, 3), incarnation=st.integers(0, 1))
    def work(self, name: str, replica: str, requests: int, incarnation: int) -> None:
        if name in self.fleet.heads:
            engine = engine_key(1, f"tcp://{replica}:1", f"tcp://{replica}:2", incarnation)
            self.fleet.report(name, ReplicaWork(engine, requests, 7 * requests))

    @rule(name=heads)
    def exchange(self, name: str) -> None:
        if name in self.fleet.heads:
            self.fleet.exchange(name)

    @rule(count=st.integers(1, 6), status=st.sampled_from(ReplicaStatus))
    def burst(self, count: int, status: ReplicaStatus) -> None:
        """More lists than a queue takes."""
        self.fleet.exchange(*self.fleet.heads)
        for number in range(count):
            self.announce("abcd"[number % 4], status, 2 + number % 2)
            self.fleet.tick(0.05)
        self.settle()

    @rule(name=heads, replica=replicas, status=st.sampled_from(ReplicaStatus))
    def reconnect(self, name: str, replica: str, status: ReplicaStatus) -> None:
        """A head gets a change in a full list, and the others in a delta."""
        self.announce(replica, status, 3)
        for _ in range(2):
            self.fleet.connect(name, GENERATIONS[name])
            self.settle()

    @rule(name=heads, replica=replicas, status=st.sampled_from(ReplicaStatus), frame=st.sampled_from([b"", b"[{}]"]))
    def garble(self, name: str, replica: str, status: ReplicaStatus, frame: bytes) -> None:
        """The frame with a change is damaged on its way."""
        if head := self.fleet.heads.get(name):
            self.fleet.exchange(name)
            self.announce(replica, status, 3)
            self.fleet.tick(0.05)
            head.down.clear()
            head.session.receive(frame, self.fleet.now)

    @rule(name=heads)
    def beat(self, name: str) -> None:
        if head := self.fleet.heads.get(name):
            head.session.beat()
            head.handle(head.session.check_silence(self.fleet.now, 10**6 + int(self.fleet.now * 1000)))

    @rule()
    def restart(self) -> None:
        self.fleet.restart()
        for name, status in self.announced.items():
            self.fleet.announce(make_event(name, stage_id=len(name), status=status))

    @rule()
    def settle(self) -> None:
        self.fleet.settle()
        self.all_heads_are_up_to_date()

    def teardown(self) -> None:
        self.settle()

    def all_heads_are_up_to_date(self) -> None:
        for name, head in self.fleet.heads.items():
            others = {
                other.name: other.in_flight
                for other in self.fleet.heads.values()
                if other.name != name and other.generation == head.generation
            }
            assert {head_id: work for head_id, work in head.others.items() if work} == {
                head_id: work for head_id, work in others.items() if work
            }
            assert rows(head.lists[-1]) == rows(self.fleet.listed())
            assert numbers(head.lists[-1]) == numbers(self.fleet.listed())

    @invariant()
    def every_list_is_what_there_was_at_some_moment(self) -> None:
        for head in self.fleet.heads.values():
            assert all(rows(replicas) in self.fleet.states for replicas in head.lists)

    @invariant()
    def no_list_is_older_than_the_one_before(self) -> None:
        for head in self.fleet.heads.values():
            times = [replicas.timestamp for replicas in head.lists]
            assert times == sorted(times)

    @invariant()
    def replicas_of_a_stage_have_different_numbers(self) -> None:
        for head in self.fleet.heads.values():
            for replicas in head.lists:
                listed = [(info.stage_id, info.replica_id) for info in (*replicas.replicas, *replicas.no_new_work)]
                assert len(set(listed)) == len(listed)

    @invariant()
    def everything_said_is_valid(self) -> None:
        assert not any(head.dropped for head in self.fleet.heads.values())


TestHeadHistories = HeadHistories.TestCase
