"""Without our flags, vLLM is what it is without the plugin; and what the flags look like to vLLM."""

import re
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.config import FLAGS

from .cli_probe import probe


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for `--config` with two of our flags and one of vLLM's."""
    file = tmp_path_factory.mktemp("config") / "fleet.yaml"
    file.write_text("omni-lb-policy: round-robin\nomni-dp-size-local: 2\nmax-model-len: 128\n")
    return file


@pytest.fixture(scope="module")
def with_plugin(config_file: Path) -> Any:
    """What a process with the plugin reports."""
    return probe("invisible", config_file, config_file.with_name("on.json"))


@pytest.fixture(scope="module")
def without_plugin(config_file: Path) -> Any:
    """The same of a process that is told to load no plugin."""
    return probe("invisible", config_file, config_file.with_name("off.json"), VLLM_PLUGINS="")


def test_no_flag_of_ours_leaves_every_engine_argument_as_it_is(with_plugin: Any, without_plugin: Any) -> None:
    assert with_plugin["engine_args"] == without_plugin["engine_args"]
    assert with_plugin["engine_args"]["additional_config"] == "{}"
    assert with_plugin["engine_args"]["max_model_len"] == "64"


def test_no_flag_of_ours_leaves_vllms_own_functions_in_place(with_plugin: Any, without_plugin: Any) -> None:
    assert with_plugin["origins"] == without_plugin["origins"]
    changed = {
        name for name, place in with_plugin["origins_with_our_flags"].items() if place != with_plugin["origins"][name]
    }
    assert changed == {
        "AsyncLLM.__init__",
        "AsyncLLM.check_health",
        "AsyncLLM.shutdown",
        "EngineCoreClient.make_async_mp_client",
    }


def test_no_flag_of_ours_imports_only_what_adds_them(with_plugin: Any, without_plugin: Any) -> None:
    entry_point = ("", ".config", ".entrypoints", ".entrypoints.plugin", ".errors")
    flags = (".command_line", ".flags", ".patching")
    assert with_plugin["imported"] == [f"vllm_omni_plugin{name}" for name in (*entry_point, ".integration")] + [
        f"vllm_omni_plugin.integration{name}" for name in flags
    ]
    assert without_plugin["imported"] == []


def test_registration_in_an_engine_process_imports_nothing(with_plugin: Any) -> None:
    assert with_plugin["imported_in_engine_process"] == []


def test_a_second_registration_wraps_nothing_again(with_plugin: Any) -> None:
    assert with_plugin["wrapped_again"] is False


def test_help_of_our_group_shows_every_flag_once(with_plugin: Any) -> None:
    assert with_plugin["help"].startswith("OmniConfig:\n")
    listed = re.findall(r"^  (--omni-[a-z-]+)", with_plugin["help"], re.MULTILINE)
    assert sorted(listed) == sorted(flag.name for flag in FLAGS)


def test_our_flags_work_in_a_config_file(with_plugin: Any) -> None:
    options = with_plugin["from_config_file"]["vllm_omni_plugin"]
    assert (options["lb_policy"], options["dp_size_local"]) == ("round-robin", 2)
