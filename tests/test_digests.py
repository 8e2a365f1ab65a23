"""When the files of an adapter are the same on two nodes."""

from pathlib import Path

import pytest

from tests.fakes.adapter_files import write_adapter
from vllm_omni_plugin.vllm_api.requests.adapter import adapter_digest

MIB = 1024 * 1024


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_every_byte_counts_of_files_up_to_64_mib(tmp_path: Path) -> None:
    weights = bytes(64 * MIB)
    places = (64 * 1024, 31 * MIB + 7, len(weights) - 1)
    written = [weights, *(flipped(weights, place) for place in places)]
    assert len({adapter_digest(str(write_adapter(tmp_path, content))) for content in written}) == len(written)


def test_of_larger_files_the_size_counts_and_what_is_in_many_places(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    weights = folder / "adapter_model.safetensors"
    digests = []
    for size, changed in ((1024 * MIB, 0), (1024 * MIB + 1, 0), (1024 * MIB, MIB)):
        with weights.open("wb") as file:
            file.truncate(size)
            file.seek(size // 3)
            file.write(b"1" * changed)
        digests.append(adapter_digest(str(folder)))
    assert len(set(digests)) == len(digests)


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


@pytest.mark.parametrize("path", ["missing", "file", "folder", "x" * 5000, "a\0b", "~nobody/at/all", "org/name"])
def test_where_no_adapter_is_found_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "folder").mkdir()
    assert adapter_digest(path) == ""


def test_what_may_not_be_read_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "open", refuse)
    assert adapter_digest(str(folder)) == ""
