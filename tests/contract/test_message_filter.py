"""Which messages may reach an engine of another process, in vLLM's own encoding."""

import random
import shutil
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.serial_utils import MsgpackEncoder

from tests.fakes.adapter_files import write_adapter
from tests.fakes.hostile_frames import hostile_message
from vllm_omni_plugin.errors import NOT_ALLOWED
from vllm_omni_plugin.vllm_api.codecs.message_filter import ALLOWED_CALLS, ALLOWED_WORKER_CALLS, reject
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_digest, adapter_of
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import ENGINE_SHUTTING_DOWN
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

API = EngineApi()


def refusal_of(method: str, *args: Any) -> str:
    """Why a call is refused; "" if it passes."""
    refusal = reject(API.encode_utility(7, method, args))
    if refusal is None:
        return ""
    assert refusal.reason
    answer = API.decode_outputs(refusal.answer).utility_output
    assert answer.call_id == 7
    assert answer.failure_message.removeprefix(NOT_ALLOWED) == refusal.reason
    assert answer.failure_message.startswith(NOT_ALLOWED) is (method != "add_lora")
    return refusal.reason


NEWER = frozenset() if PAUSE_REFUSES.applies else frozenset({"pause_generation"})
"""Calls that only engines of a newer vLLM than the installed one take."""


def test_calls_that_heads_make_pass_and_are_methods_of_the_engine() -> None:
    for method in ALLOWED_CALLS - {"collective_rpc"}:
        assert refusal_of(method, "any", ["arguments"]) == "", method
        assert hasattr(EngineCoreProc, method) is (method not in NEWER), method
    for method in ALLOWED_WORKER_CALLS:
        assert refusal_of("collective_rpc", method, None, (), {}) == "", method


def test_an_engine_that_shuts_down_refuses_calls_with_this_text() -> None:
    answers: Queue[Any] = Queue()
    engine: Any = SimpleNamespace(shutdown_state=EngineShutdownState.REQUESTED, output_queue=answers)
    assert EngineCoreProc._reject_utility_in_shutdown(engine, 0, 7, "is_sleeping")
    _, outputs = answers.get_nowait()
    assert outputs.utility_output.failure_message == ENGINE_SHUTTING_DOWN


@pytest.mark.parametrize("method", ["save_sharded_state", "shutdown", "abort_requests", "__init__", "", "x" * 10**6])
def test_other_methods_are_refused_with_an_answer(method: str) -> None:
    reason = refusal_of(method, "/root")
    assert "is not a call that heads may make" in reason
    assert len(reason) < 200


def test_other_methods_of_workers_pass_in_dev_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("collective_rpc", "save_sharded_state", None, ("/root",), {})
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    assert "VLLM_SERVER_DEV_MODE=1" in refusal_of(*call)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert refusal_of(*call) == ""


def test_functions_are_refused_in_dev_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    frames = (b"\x03", *MsgpackEncoder().encode((0, 7, "collective_rpc", (print, None, (), {}))))
    refusal = reject(frames)
    assert refusal is not None
    assert API.decode_outputs(refusal.answer).utility_output.call_id == 7


@pytest.mark.parametrize("called", [["update_weights"], {"update_weights": 1}, None, 7, b"update_weights"])
@pytest.mark.parametrize("dev_mode", ["1", "0", "true", ""])
def test_an_invalid_method_name_is_refused_with_an_answer(
    monkeypatch: pytest.MonkeyPatch, called: Any, dev_mode: str
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    assert "something that is not a name" in refusal_of("collective_rpc", called, None, (), {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path of the adapter on the head and on this node; the test changes the files."""
    return write_adapter(tmp_path / "story")


@pytest.fixture
def loaded(folder: Path) -> Adapter:
    return adapter_of(LoRARequest("story", 7, str(folder)))


def test_an_adapter_with_the_files_of_the_head_is_loaded(folder: Path, loaded: Adapter) -> None:
    shutil.rmtree(folder)
    write_adapter(folder)
    (folder / "README.md").write_text("of no concern")
    assert refusal_of("add_lora", loaded) == ""


@pytest.mark.parametrize(
    "other",
    [{"weights": b"other"}, {"config": {"r": 16}}, {"weights_name": "adapter_model.bin"}],
    ids=["weights", "configuration", "kind of file"],
)
def test_an_adapter_with_other_files_is_a_failed_call(folder: Path, loaded: Adapter, other: dict[str, Any]) -> None:
    shutil.rmtree(folder)
    write_adapter(folder, **other)
    reason = refusal_of("add_lora", loaded)
    here = adapter_digest(str(folder))
    assert here != loaded.digest
    assert all(named in reason for named in ("'story'", str(folder), here, loaded.digest))


def test_an_adapter_with_files_only_on_the_head_is_a_failed_call(folder: Path, loaded: Adapter) -> None:
    shutil.rmtree(folder)
    assert "(no files)" in refusal_of("add_lora", loaded)


def test_an_adapter_without_files_on_the_head_is_loaded(folder: Path) -> None:
    write_adapter(folder.parent / "elsewhere")
    assert refusal_of("add_lora", Adapter("story", 7, str(folder))) == ""
    assert refusal_of("add_lora", adapter_of(LoRARequest("story", 7, "org/story"))) == ""


@pytest.mark.parametrize("kind", [b"\x02", b"\x04", b"\x05", b"", b"\x00\x00"])
def test_only_requests_aborts_and_calls_pass(kind: bytes) -> None:
    refusal = reject((kind, b"\x90"))
    assert refusal is not None
    assert not refusal.answer


def test_no_message_raises_an_exception() -> None:
    rng = random.Random(5)
    calls = (("collective_rpc", ("m", None, (), {})), ("add_lora", (Adapter("a", 1, "/a", digest="d"),)))
    samples = [bytes(frame) for method, args in calls for frame in API.encode_utility(1, method, args)]
    for _ in range(5000):
        reject([rng.choice((b"\x00", b"\x01", b"\x03", b"\x07")), *hostile_message(rng, samples)])
        reject(hostile_message(rng, samples))
    assert reject(()) is not None
    assert reject((b"\x03", b"\x91" * 10_000)) is not None
    assert (
        reject((b"\x03", *API.encode_utility(1, "add_lora", (Adapter("a", 1, "~a\0b", digest="d"),))[1:])) is not None
    )
