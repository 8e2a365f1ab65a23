"""A Python stage behind a replica server."""

import os
import select
from concurrent.futures import ThreadPoolExecutor

from tests.stages.heads import api, source, stage
from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.replicas.replica_server.served_engine import HEAD_SLOTS, start_served_engine
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher


async def test_a_replica_server_resets_a_stage_for_the_next_head_and_shuts_it_down() -> None:
    described = stage()
    codec = api(described)
    with ThreadPoolExecutor(2) as executor:
        served = await start_served_engine(PythonStageLauncher(described, lambda pid: None), codec, executor, 0)
        try:
            await served.client.call("pause_scheduler", "keep", False)
            request = codec.build(source(), StageInput(text="x"), {}, for_client=False)
            served.client.add_request(request, "a")
            await served.client.reset()
            assert await served.client.call("is_sleeping") is True, "only an operator ends a pause"
            assert served.identity == b"\x00\x00"
            assert len(served.slots) == HEAD_SLOTS
            fd = os.pidfd_open(served.pid)
        finally:
            await served.close(executor)
        assert select.select([fd], [], [], 0)[0], "its process has not ended"
        os.close(fd)
