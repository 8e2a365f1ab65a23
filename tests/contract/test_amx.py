"""AMX is requested in the engines of a fleet, if the processor has it, and nowhere else."""

import logging
import multiprocessing
from pathlib import Path

import pytest
from vllm_omni_plugin.entrypoints.plugin import register

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.vllm_api.launch import amx
from vllm_omni_plugin.vllm_api.launch.amx import request_amx

ASKED = (158, 0x1023, 18)
WITH_TILES = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n\nprocessor\t: 1\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu avx512f not_amx_tile\n\nprocessor\t: 1\n"
OF_ARM = "processor\t: 0\nFeatures\t: fp asimd sve amx_tile\n"


def asked(text: str | None, tmp_path: Path, machine: str = "x86_64", answer: int = 0) -> list[tuple[int, ...]]:
    """The system calls that are made on a machine with this /proc/cpuinfo."""
    calls: list[tuple[int, ...]] = []

    def system_call(*arguments: int) -> int:
        calls.append(arguments)
        return answer

    cpu_info = tmp_path / "cpuinfo"
    if text is not None:
        cpu_info.write_text(text)
    request_amx(cpu_info, machine, system_call)
    return calls


def test_amx_is_requested_where_the_processor_has_it(tmp_path: Path) -> None:
    assert asked(WITH_TILES, tmp_path) == [ASKED]


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        pytest.param(WITHOUT, "x86_64", id="processor without"),
        pytest.param(OF_ARM, "x86_64", id="no line of flags"),
        pytest.param("", "x86_64", id="nothing said"),
        pytest.param(None, "x86_64", id="no such file"),
        pytest.param(WITH_TILES, "aarch64", id="another family, where the call has another number"),
    ],
)
def test_amx_is_not_requested_on_other_processors(text: str | None, machine: str, tmp_path: Path) -> None:
    assert asked(text, tmp_path, machine) == []


def test_a_refusal_is_logged_with_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm"):
        asked(WITH_TILES, tmp_path, answer=-1)
    assert "--dtype float32" in caplog.text


def test_the_real_system_call_raises_no_error() -> None:
    # In a process of its own: the permission stays for the life of a process.
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=request_amx)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_registration_requests_amx_only_in_an_engine_of_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(amx, "request_amx", lambda: calls.append("asked"))
    monkeypatch.delenv(FLEET_ENGINE, raising=False)
    register()
    assert calls == []
    monkeypatch.setenv(FLEET_ENGINE, "1")
    register()
    assert calls == ["asked"]
