"""A stage's process answers all messages, whatever its class does."""

import asyncio

import pytest
from vllm.v1.engine import FinishReason

from tests.fakes.conditions import eventually
from tests.stages.gate import Gate
from tests.stages.heads import open_head, stage
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize


async def test_a_request_is_answered_with_what_the_class_computes() -> None:
    async with open_head(stage(options={"ending": "?"}, sampling={"voice": "low", "speed": 1})) as head:
        assert head.spawned == [head.replica.pid]
        assert head.api.engine_size(head.replica.ready_response) == EngineSize()
        head.send("a", StageInput([1, 2], "hello", sampling={"speed": 2}))
        answer = await head.answer("a")
        assert (answer.text, list(answer.token_ids), answer.finish_reason) == ("hello?", [1, 2], "stop")
        assert answer.metadata == {"batch": 1, "device": "cpu", "pid": head.replica.pid, "voice": "low", "speed": 2}
        assert head.numbers("a") == [[0]]
    assert head.replicas[0].lost.result() == "closed: it exited with code 0"


async def test_waiting_inputs_form_one_batch_of_at_most_max_batch_size() -> None:
    async with open_head(stage()) as head:
        await head.client.call("pause_scheduler", "keep", False)
        for number in range(9):
            head.send(f"{number}", "quick")
        await head.client.call("resume_scheduler")
        batches = [(await head.answer(f"{number}")).metadata["batch"] for number in range(9)]
        assert batches == [4, 4, 4, 4, 4, 4, 4, 4, 1]
        assert [(stats.num_running_reqs, stats.num_waiting_reqs) for stats in head.stats] == [(4, 1), (1, 0), (0, 0)]


async def test_an_aborted_request_has_no_output_whether_it_waits_or_is_computed(gate: Gate) -> None:
    async with open_head(stage()) as head:
        head.send("computed", gate.job)
        await gate.reached()
        head.send("waits", "quick")
        head.client.abort_requests(["computed", "waits", "unknown"])
        head.send("last", "quick")
        await head.client.call("is_sleeping")
        gate.release()
        await head.answer("last")
        assert {output.request_id for output in head.outputs} == {"last"}


async def test_an_idle_stage_is_reported_also_if_all_requests_were_aborted(gate: Gate) -> None:
    async with open_head(stage()) as head:
        head.send("aborted", gate.job)
        await gate.reached()
        head.client.abort_requests(["aborted"])
        await head.client.call("is_sleeping")
        gate.release()
        await eventually(lambda: head.stats != [], "a report")
        assert [(stats.num_running_reqs, stats.num_waiting_reqs) for stats in head.stats] == [(0, 0)]
        assert head.outputs == []


CANNOT_BE_SENT = "TypeError: compute returned a StageOutput that cannot be sent: "
FAULTS = {
    "fail": "ValueError: no such voice",
    "no text": "Unspeakable: ",
    "surrogate": "ValueError: no file \\udcff",
    "nothing": "TypeError: compute returned a NoneType instead of a StageOutput",
    "no tensor": "TypeError: compute returned a StageOutput whose tensor is a list",
    "metadata": f"{CANNOT_BE_SENT}Encoding objects",
    "keys": f"{CANNOT_BE_SENT}Expected `str`, got `int`",
    "text": f"{CANNOT_BE_SENT}Expected `str`",
    "tokens": f"{CANNOT_BE_SENT}Expected `int` >= 0 - at `$.token_ids[1]`",
    "raise for all": "RuntimeError: out of paper",
    "one too many": "TypeError: compute returned 2 results for 1 jobs",
}


async def test_an_exception_fails_the_request_and_the_process_continues() -> None:
    async with open_head(stage("classes:Faulty")) as head:
        for text, error in FAULTS.items():
            head.send(text, text)
            answer = await head.answer(text)
            assert answer.finish_reason == "error", text
            assert answer.metadata["error"].startswith(f"Stage 'vocoder': Faulty: {error}"), text
            assert answer.metadata["status"] == 500, text
            assert head.api.cut_short(head.outputs[-1])
        head.send("b", "all right")
        assert (await head.answer("b")).text == "all right"


async def test_an_exception_of_one_job_does_not_fail_the_others_of_its_batch() -> None:
    async with open_head(stage("classes:Faulty")) as head:
        await head.client.call("pause_scheduler", "keep", False)
        for text in ("good", "fail", "refuse"):
            head.send(text, text)
        await head.client.call("resume_scheduler")
        assert (await head.answer("good")).text == "good"
        assert (await head.answer("fail")).metadata["status"] == 500
        assert (await head.answer("refuse")).metadata == {"error": "Stage 'vocoder': speak up", "status": 400}


async def test_a_pause_holds_requests_and_one_that_waits_awaits_what_runs(gate: Gate) -> None:
    async with open_head(stage()) as head:
        head.send("awaited", gate.job)
        await gate.reached()
        pause = asyncio.create_task(head.client.call("pause_scheduler", "wait", True))
        await asyncio.sleep(0)
        head.send("held", "later")
        assert (await head.client.call("is_scheduler_paused"), pause.done()) == (True, False)
        gate.release()
        await pause
        assert [output.request_id for output in head.outputs] == ["awaited"]
        assert (await head.client.call("is_sleeping"), len(head.outputs)) == (True, 1)
        await head.client.call("sleep", 1, "abort")
        (held,) = head.outputs[1:]
        assert (held.request_id, held.finish_reason) == ("held", FinishReason.ABORT)
        assert (await head.client.call("wake_up", None), await head.client.call("is_sleeping")) == (True, False)
        head.send("after", "all right")
        assert (await head.answer("after")).text == "all right!"


async def test_calls_without_effect_are_answered_and_unsupported_calls_fail() -> None:
    async with open_head(stage()) as head:
        assert await head.client.call("get_supported_tasks") == []
        assert await head.client.call("reset_prefix_cache", False, False) is True
        await head.client.call("set_weight_version", "two")
        assert await head.client.call("get_weight_version") == "two"
        for method, args in (("reset_mm_cache", ()), ("reset_encoder_cache", ()), ("profile", (True, None))):
            assert await head.client.call(method, *args) is None
        for method, args in (("add_lora", ("adapter",)), ("collective_rpc", ("anything",))):
            with pytest.raises(ReplicaError, match=f"a Python stage has no method '{method}'"):
                await head.client.call(method, *args)
        with pytest.raises(ReplicaError, match="positional argument"):
            await head.client.call("is_sleeping", 1)


NO_MESSAGES = {
    "one frame": (b"\x00",),
    "not msgpack": (b"\x00", b"garbage"),
    "unknown type": (b"\x09", b"\x90"),
    "empty": (b"", b""),
    "a client that is not there": (b"\x00", b"\x92\xa1x\x63"),
    "a call of a client that is not there": (b"\x03", b"\x94\x63\x01\xa1x\x90"),
    "a frame that is missing": (b"\x00", b"\x97\xa1x\x00\xc2\xc3\xc0\xc0\x93\xa7float32\x91\x05\x09"),
    "no ids": (b"\x01", b"\x81\x01\x02"),
}


async def test_invalid_messages_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_head(stage()) as head:
        for name, frames in NO_MESSAGES.items():
            with monkeypatch.context() as patch:
                patch.setattr(head.api, "encode_add", lambda *_, frames=frames: frames)
                head.send("garbage", "")
            head.send(name, "still here")
            assert (await head.answer(name)).text == "still here!", name
        assert await head.client.call("is_sleeping") is False
