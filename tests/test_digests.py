"""When the files of an adapter are the same on two nodes."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.adapter_files import write_adapter
from vllm_omni_plugin.vllm_api.engine_messages.adapter import adapter_digest


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"weights": b"longer weights"}, False, id="size of the weights"),
        pytest.param({"config": {"r": 16}}, False, id="configuration"),
        pytest.param({"weights_name": "adapter_model.bin"}, False, id="kind of file"),
    ],
)
def test_configuration_and_size_of_the_weights_count(tmp_path: Path, changed: dict[str, Any], same: bool) -> None:
    one, other = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "other", **changed)
    assert (adapter_digest(one) == adapter_digest(other)) is same


def test_it_is_that_of_the_files_which_are_loaded_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "one")
    other = write_adapter(tmp_path / "two")
    (other / "adapter_model.bin").write_bytes(b"not loaded where there is a safetensors file")
    (other / "README.md").write_text("about it")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len({adapter_digest(path) for path in (str(folder), str(other), "~/one", "two")}) == 1


@pytest.mark.parametrize(
    "path", ["missing", "file", "folder", "x" * 5000, "a\0b", "~a\0b", "~nobody/at/all", "org/name"]
)
def test_where_no_adapter_is_found_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "folder").mkdir()
    assert adapter_digest(path) == ""


def test_what_may_not_be_read_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert adapter_digest(str(folder)) == ""
