"""What several API servers agree on with vLLM's own processes."""

import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import values
from vllm.entrypoints.launchers import launcher
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_plugin.integration.api_server_process import ApiServerProcesses
from vllm_omni_plugin.integration.api_servers import NOT_ACCEPTING


class Arguments:
    max_num_queued_reqs = 8


def test_a_server_that_takes_no_connections_says_so_as_vllm_understands_it() -> None:
    assert NOT_ACCEPTING == launcher._NOT_ACCEPTING


def test_what_a_server_that_died_said_last_counts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    live: Any = values.MultiProcessValue(process_identifier=lambda: 17)
    live("gauge", "g", "g", (), (), "Help.", multiprocess_mode="livesum").set(3.0)
    processes = ApiServerProcesses(2, "http://here", None, Arguments(), lambda pid: None)  # type: ignore[arg-type]
    stats = [SharedAdmissionStats({"mp_admission_counters": processes.admitted}, 2, index) for index in range(2)]
    stats[0].set_num_requests(5)
    stats[1].set_num_requests(7)
    processes.bury(1, 17)
    assert stats[0].get_num_requests() == 5
    assert os.listdir(tmp_path) == []
    live.close_all_files()
