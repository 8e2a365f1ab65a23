"""Dropped frames are counted always and logged once per peer and reason."""

import pytest

from vllm_omni_plugin.coordinator.server.drops import DropLog, DropReason


def test_peer_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog()
    for _ in range(5):
        drops.record(DropReason.STALE, "10.0.0.1", "old")
        drops.record(DropReason.MALFORMED, "10.0.0.1", "bad")
    assert len(caplog.records) == 2
    assert caplog.text.count("'10.0.0.1'") == 2
    assert caplog.text.count("(stale)") == caplog.text.count("(malformed)") == 1


def test_number_of_logged_peers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropLog(max_peers=3)
    for number in range(100):
        drops.record(DropReason.MALFORMED, f"peer{number}", "bad")
    assert len(caplog.records) == 4
    assert drops.counts["malformed"] == 100


def test_frame_content_cannot_break_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    DropLog().record(DropReason.MALFORMED, "10.0.0.1", "bad\nERROR forged line")
    assert "\n" not in caplog.text.rstrip("\n")
