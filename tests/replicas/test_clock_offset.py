"""Times of another clock, told in ours."""

from vllm_omni_plugin.replicas.remote.remote_replica import ClockOffset


def test_the_fastest_message_gives_the_offset() -> None:
    offset = ClockOffset()
    assert offset.observe(timestamp=10.0, now=110.5) == 100.5
    assert offset.observe(timestamp=11.0, now=111.125) == 100.125
    assert offset.observe(timestamp=12.0, now=119.0) == 100.125


def test_the_offset_follows_clock_drift() -> None:
    offset = ClockOffset()
    assert offset.observe(timestamp=0.0, now=100.0) == 100.0
    assert offset.observe(timestamp=70.0, now=171.0) == 100.0
    assert offset.observe(timestamp=140.0, now=241.0) == 101.0
