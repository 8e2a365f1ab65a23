"""A head's own admin key: commands of its user find it on its machine, by the head's port, while the head runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_plugin import cli
from vllm_omni_plugin.admin.admin_keys import find_local_key, publish_local_key

PORT = 65_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "vllm-omni-plugin"


def test_the_key_is_found_by_the_port_and_new_at_each_start(folder: Path) -> None:
    assert find_local_key(PORT) is None
    first = publish_local_key(PORT)
    second = publish_local_key(PORT)
    other = publish_local_key(PORT + 1)
    assert len({first, second, other}) == 3
    assert (find_local_key(PORT), find_local_key(PORT + 1)) == (second, other)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_key_is_removed_at_the_end_of_its_head_but_not_that_of_a_later_head(folder: Path) -> None:
    script = "from vllm_omni_plugin.admin.admin_keys import *; publish_local_key(65000); print(find_local_key(65000))"
    assert len(subprocess.check_output([sys.executable, "-c", script], text=True)) > 32
    assert not list(folder.iterdir())
    later = publish_local_key(PORT)
    script = "from vllm_omni_plugin.admin import admin_keys; admin_keys._remove(65000, 'older', admin_keys.os.getpid())"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert find_local_key(PORT) == later


def test_a_head_without_a_place_for_its_key_says_so_and_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.admin.admin_keys.folder_paths", lambda: [tmp_path / "absent" / "folder"])
    assert len(publish_local_key(PORT)) > 32
    assert "--omni-admin-key-file" in caplog.text
    assert find_local_key(PORT) is None


def test_a_file_of_another_users_is_not_taken(folder: Path) -> None:
    publish_local_key(PORT)
    (path,) = folder.iterdir()
    path.chmod(0o644)
    assert find_local_key(PORT) is None


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (f"http://127.0.0.1:{PORT}", True),
        (f"http://localhost:{PORT}", True),
        (f"http://[::1]:{PORT}", True),
        (f"http://127.0.0.1:{PORT + 1}", False),
        (f"http://10.0.0.1:{PORT}", False),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:x", False),
    ],
)
def test_the_command_prints_the_key_of_a_head_on_this_machine_only(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str, found: bool
) -> None:
    key = publish_local_key(PORT)
    assert cli.main(["admin-key", "--url", url]) == (0 if found else 1)
    printed = capsys.readouterr()
    assert printed.out == (f"{key}\n" if found else "")
    assert found or url in printed.err
