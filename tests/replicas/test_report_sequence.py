"""Batches of an engine's reports are applied in order, once, and asked for again when they are missed."""

from vllm_omni_plugin.replicas import report_sequence
from vllm_omni_plugin.replicas.report_sequence import ReportSequence, Step

A, B, C, D = b"a", b"b", b"c", b"d"
ASK = Step(ask=True)


def test_batches_in_order_are_applied_at_once() -> None:
    sequence = ReportSequence(can_ask=True)
    assert [sequence.published(0, A), sequence.published(1, B)] == [Step(batches=(A,)), Step(batches=(B,))]


def test_a_gap_is_asked_for_once_and_what_came_after_it_waits() -> None:
    sequence = ReportSequence(can_ask=True)
    sequence.published(0, A)
    assert [sequence.published(2, C), sequence.published(3, D)] == [ASK, Step()]
    assert sequence.expected == 1
    assert [sequence.replayed(1, B), sequence.replayed(2, C)] == [Step(batches=(B,)), Step(batches=(C,))]
    assert sequence.replay_ended() == Step(batches=(D,))
    assert sequence.expected == 4


def test_batches_that_go_on_in_order_while_an_answer_is_outstanding_do_not_wait() -> None:
    sequence = ReportSequence(can_ask=True)
    sequence.ask()
    assert sequence.published(0, A) == Step(batches=(A,))
    assert sequence.replayed(0, A) == Step()
    assert sequence.replay_ended() == Step()


def test_what_the_publisher_has_forgotten_is_lost() -> None:
    sequence = ReportSequence(can_ask=True)
    sequence.published(5, B)
    assert sequence.replayed(4, A) == Step(lost=True, batches=(A,))
    assert sequence.replay_ended() == Step(batches=(B,))


def test_a_gap_that_no_answer_fills_is_lost() -> None:
    sequence = ReportSequence(can_ask=True)
    sequence.published(3, A)
    sequence.published(4, B)
    assert sequence.replay_ended() == Step(lost=True, batches=(A, B))
    assert sequence.published(5, C) == Step(batches=(C,))


def test_batches_before_a_second_gap_are_void() -> None:
    sequence = ReportSequence(can_ask=True)
    sequence.published(3, A)
    sequence.published(5, B)
    assert sequence.replay_ended() == Step(lost=True, batches=(B,))


def test_without_anybody_to_ask_a_gap_is_lost_at_once() -> None:
    sequence = ReportSequence(can_ask=False)
    assert sequence.published(0, A) == Step(batches=(A,))
    assert sequence.published(2, C) == Step(lost=True, batches=(C,))


def test_a_batch_that_was_applied_is_not_applied_again() -> None:
    sequence = ReportSequence(can_ask=False)
    sequence.published(0, A)
    assert sequence.published(0, A) == Step()


def test_no_more_batches_wait_than_a_publisher_remembers() -> None:
    sequence = ReportSequence(can_ask=True)
    for number in range(1, report_sequence.MAX_WAITING + 10):
        sequence.published(number, A)
    assert len(sequence.replay_ended().batches) == report_sequence.MAX_WAITING
