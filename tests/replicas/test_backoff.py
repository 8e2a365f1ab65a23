"""The pause before a restart."""

from vllm_omni_plugin.replicas.backoff import RestartBackoff


def test_the_pause_doubles_up_to_a_minute() -> None:
    backoff = RestartBackoff()
    assert [backoff.after(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_pause_starts_over_after_a_minute_of_life() -> None:
    backoff = RestartBackoff()
    assert [backoff.after(lived) for lived in (0.0, 59.9, 60.0, 0.0)] == [1, 2, 1, 2]
