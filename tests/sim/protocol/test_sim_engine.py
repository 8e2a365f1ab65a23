"""Simulated engines speak vLLM's protocol over real sockets, through the client of real engines."""

from math import exp
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor

from tests.fakes.conditions import eventually
from tests.sim.drive import answer
from tests.sim.drive import request as sim_request
from tests.sim.protocol.heads import FAST, Head
from tests.sim.protocol.requests import LONG, request
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine.running_engine import Engine
from vllm_omni_plugin.vllm_api.codecs import sim_protocol
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES


def ended(head: Head) -> dict[str, FinishReason]:
    return {output.request_id: output.finish_reason for output in head.outputs if output.finished}


def tokens(head: Head, request_id: str) -> list[int]:
    return [token for output in head.outputs if output.request_id == request_id for token in output.new_token_ids]


async def test_requests_are_answered_with_the_models_tokens(replica: Engine, head: Head) -> None:
    assert replica.ready_response == b"ready 0"
    for request_id in ("a", "b"):
        replica.client.add_request(request(request_id), request_id)
    await eventually(lambda: len(ended(head)) == 2)
    assert ended(head) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert tokens(head, "a") == tokens(head, "b") == answer(sim_request("a"), FAST)
    await replica.close(head.executor)
    assert (head.deaths, replica.lost.result()) == ([], "closed")


async def test_the_first_output_has_prefill_stats_and_each_step_has_scheduler_stats(
    replica: Engine, head: Head
) -> None:
    for request_id in ("a", "b"):
        replica.client.add_request(request(request_id, 17), request_id)
        await eventually(lambda request_id=request_id: request_id in ended(head))
    first, *rest = [output for output in head.outputs if output.request_id == "b"]
    assert first.prefill_stats.num_cached_tokens == 16
    assert [event.type.name for event in first.events] == ["QUEUED", "SCHEDULED"]
    assert all(output.prefill_stats is None for output in rest)
    assert max(stats.num_running_reqs for stats in head.stats) == 1
    assert sum(stats.prefix_cache_stats.hits for stats in head.stats) == 16


@pytest.mark.parametrize("count", [0, 3, -1])
async def test_the_wanted_logprobs_come_with_each_token(replica: Engine, head: Head, count: int) -> None:
    replica.client.add_request(request("a", logprobs=count, max_tokens=2), "a")
    await eventually(lambda: "a" in ended(head))
    processor = LogprobsProcessor.from_new_request(None, request("a", logprobs=count))
    for output in head.outputs:
        processor.update_from_output(output)
    assert processor.logprobs is not None
    positions = [dict(position) for position in processor.logprobs if position]
    assert [next(iter(position)) for position in positions] == tokens(head, "a")
    wanted = FAST.vocabulary_size if count < 0 else max(count, 1)
    assert [len(position) for position in positions] == [wanted] * 2
    assert [entry.rank for entry in positions[0].values()] == list(range(1, wanted + 1))
    assert sum(exp(entry.logprob) for entry in positions[0].values()) <= 1
    assert head.deaths == []


async def test_an_aborted_request_has_no_further_outputs(slow_head: Head) -> None:
    head = slow_head
    replica = await head.start()
    replica.client.add_request(request("a", max_tokens=LONG), "a")
    await eventually(lambda: tokens(head, "a"))
    replica.client.abort_requests(["a", "unknown"])
    assert await replica.client.call("is_sleeping") is False
    heard = len(head.outputs)
    replica.client.add_request(request("b", max_tokens=2), "b")
    await eventually(lambda: "b" in ended(head))
    assert {output.request_id for output in head.outputs[heard:]} == {"b"}


async def test_requests_with_unsupported_features_end_with_an_error(replica: Engine, head: Head) -> None:
    embeddings = request("a")
    embeddings.prompt_token_ids = None
    streaming = request("b")
    streaming.resumable = True
    for asked in (embeddings, streaming, request("c", prompt=64)):
        replica.client.add_request(asked, asked.request_id)
    await eventually(lambda: len(ended(head)) == 3)
    assert set(ended(head).values()) == {FinishReason.ERROR}
    assert head.deaths == []


async def dies_of(head: Head, replica: Engine, reason: str) -> None:
    await eventually(lambda: head.deaths)
    process = head.launcher.processes[0]
    await eventually(lambda: process.ended)
    assert replica.client.engine_failed
    assert f"it died: {reason}" in process.exit_reason()
    assert process.exit_reason() in head.deaths[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        pytest.param([request("a", max_tokens=LONG)] * 2, "duplicate request id a", id="a duplicate id, as in vLLM"),
        pytest.param(
            [request("good", max_tokens=LONG), request("bad", allowed_token_ids=[-1])], "OverflowError", id="a step"
        ),
    ],
)
async def test_a_request_kills_the_engine_with_notice(
    replica: Engine, head: Head, asked: list[Any], reason: str
) -> None:
    for each in asked:
        replica.client.add_request(each, each.request_id)
    await dies_of(head, replica, reason)


async def test_an_invalid_message_kills_the_engine(head: Head) -> None:
    class Garbling(EngineApi):
        def encode_add(self, *args: Any, **kwargs: Any) -> Any:
            return (b"\x00", b"garbage")

    replica = await head.start(Garbling())
    replica.client.add_request(request(), "a")
    await dies_of(head, replica, "")


async def test_an_output_that_cannot_be_made_kills_the_engine(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(sim_protocol, "output", broken)
    replica = await head.start()
    replica.client.add_request(request(), "a")
    await dies_of(head, replica, "RuntimeError('broken')")


async def test_a_killed_engine_is_seen_by_its_sentinel_and_can_be_started_again(replica: Engine, head: Head) -> None:
    replica.client.add_request(request("a", max_tokens=LONG), "a")
    head.launcher.processes[0].kill()
    await eventually(lambda: head.deaths)
    assert "exited" in head.deaths[0]
    await replica.close(head.executor)
    again = await head.start()
    again.client.add_request(request("b"), "b")
    await eventually(lambda: "b" in ended(head))


async def test_a_pause_aborts_keeps_or_awaits_what_runs(replica: Engine, head: Head) -> None:
    call = replica.client.call
    replica.client.add_request(request("aborted", max_tokens=LONG), "aborted")
    await call("pause_scheduler", "abort", True)
    await eventually(lambda: ended(head) == {"aborted": FinishReason.ABORT})
    assert (await call("is_scheduler_paused"), await call("is_sleeping")) == (True, True)
    await call("resume_scheduler")

    replica.client.add_request(request("awaited", max_tokens=LONG), "awaited")
    await eventually(lambda: tokens(head, "awaited"))
    await call("pause_scheduler", "wait", False)
    assert ended(head)["awaited"] is FinishReason.LENGTH
    replica.client.add_request(request("later"), "later")
    await call("resume_scheduler")
    await eventually(lambda: "later" in ended(head))

    replica.client.add_request(request("kept", max_tokens=LONG), "kept")
    await call("pause_scheduler", "keep", False)
    assert "kept" not in ended(head)
    await call("resume_scheduler")
    await eventually(lambda: "kept" in ended(head))


@pytest.mark.skipif(not PAUSE_REFUSES.applies, reason="requests wait in paused engines of this vLLM")
async def test_a_paused_engine_refuses_requests_as_retryable(replica: Engine, head: Head) -> None:
    for mode in ("abort", "wait"):
        await replica.client.call("pause_generation", mode, True)
        replica.client.add_request(request(mode), mode)
        await eventually(lambda mode=mode: mode in ended(head))
        refused = head.outputs[-1]
        assert EngineApi().refused(refused)
        assert (refused.finish_reason, refused.new_token_ids) == (FinishReason.ERROR, [])
        await replica.client.call("resume_scheduler")
        replica.client.add_request(request(mode), mode)
        await eventually(lambda mode=mode: ended(head)[mode] is FinishReason.LENGTH)


async def test_calls_are_answered_as_vllms_engine_answers_them(replica: Engine) -> None:
    call = replica.client.call
    adapter = LoRARequest("adapter", 7, "somewhere")
    assert await call("get_supported_tasks") == ["generate"]
    assert await call("add_lora", adapter) is True
    assert await call("list_loras") == [7]
    assert await call("pin_lora", 7) is True
    assert [await call("remove_lora", 7), await call("remove_lora", 7)] == [True, False]
    await call("sleep", 1, "abort")
    assert [await call("wake_up", ["weights"]), await call("is_sleeping")] == [False, True]
    assert [await call("wake_up", None), await call("is_sleeping")] == [True, False]
    await call("set_weight_version", "two")
    assert await call("get_weight_version") == "two"
    assert await call("reset_prefix_cache", False, False) is True
    assert await call("collective_rpc", "anything", None, [], None) == [None]
    for method in ("reset_mm_cache", "reset_encoder_cache", "profile"):
        assert await call(method, *([True, None, None, None] if method == "profile" else [])) is None


@pytest.mark.parametrize(
    ("method", "args", "complaint"),
    [
        ("no_such_method", (), "a simulated engine has no method 'no_such_method'"),
        ("pin_lora", (9,), "adapter 9 is not loaded"),
        ("is_sleeping", (1, 2), "takes 0 positional arguments"),
        ("release_kv_cache_memory", (), "must be paused first"),
        ("add_lora", ("not an adapter",), "Expected"),
    ],
)
async def test_a_failed_call_has_a_reason_and_changes_nothing(
    replica: Engine, method: str, args: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(ReplicaError, match=f"Call to {method} method failed: .*{complaint}"):
        await replica.client.call(method, *args)
    assert await replica.client.call("is_sleeping") is False
