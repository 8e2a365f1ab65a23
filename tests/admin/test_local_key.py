"""A head's own admin key: commands of its user find it on its machine, by the head's address, while the head runs."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes.http_server import FakeServer
from vllm_omni_plugin import cli
from vllm_omni_plugin.admin.admin_keys import LocalHead, find_head, find_local_key, publish_head, publish_local_key

HERE = "127.0.0.1"
PORT = 65_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in the run-time directory."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "vllm-omni-plugin"


def test_the_key_is_found_by_the_address_and_new_at_each_start(folder: Path) -> None:
    assert find_local_key(HERE, PORT) is None
    first = publish_local_key(None, PORT)
    second = publish_local_key(None, PORT)
    other = publish_local_key(None, PORT + 1)
    assert len({first, second, other}) == 3
    assert (find_local_key(HERE, PORT), find_local_key(HERE, PORT + 1)) == (second, other)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_heads_of_two_containers_that_share_the_folder_have_their_own_keys_at_the_same_address(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish_local_key(None, PORT)
    with monkeypatch.context() as container:
        container.setattr(os, "readlink", lambda path: {"/proc/self/ns/net": "net:[1]"}[path])
        assert find_local_key(HERE, PORT) is None
        second = publish_local_key(None, PORT)
        assert find_local_key(HERE, PORT) == second
    assert find_local_key(HERE, PORT) == first


def test_a_key_is_removed_at_the_end_of_its_head_but_not_that_of_a_later_head(folder: Path) -> None:
    script = (
        "from vllm_omni_plugin.admin.admin_keys import *;"
        "publish_local_key('', 65000); print(find_local_key('127.0.0.1', 65000), flush=True)"
    )
    assert len(subprocess.check_output([sys.executable, "-c", script], text=True)) > 32
    assert not list(folder.parent.rglob("*.key"))
    later = ""
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as earlier:
        assert earlier.stdout is not None
        assert earlier.stdout.readline() != f"{later}\n"
        later = publish_local_key(None, PORT)
        earlier.communicate("\n")
    assert find_local_key(HERE, PORT) == later


def test_a_key_is_found_without_the_heads_run_time_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = publish_local_key(None, PORT)
    shutil.rmtree(folder)
    assert find_local_key(HERE, PORT) == key
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert find_local_key(HERE, PORT) == key


def test_a_head_says_where_its_operators_routes_are(folder: Path) -> None:
    assert find_head(HERE, PORT) is None
    publish_head(None, PORT, LocalHead("key", "http://127.0.0.1:1"))
    assert find_head(HERE, PORT) == ("key", "http://127.0.0.1:1")
    assert find_local_key(HERE, PORT) == "key"
    publish_head(None, PORT, LocalHead("", "http://127.0.0.1:1"))
    assert find_local_key(HERE, PORT) is None
    key = publish_local_key(None, PORT)
    assert find_head(HERE, PORT) == (key, "")


@pytest.mark.parametrize("has_key_file", [True, False])
def test_the_command_goes_where_the_operators_routes_are(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_key_file: bool
) -> None:
    for name in ("VLLM_API_KEY", "OMNI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    key = "" if has_key_file else "key-of-this-user"
    with FakeServer((200, {"replicas": []})) as admin:
        publish_head(None, PORT, LocalHead(key, admin.url))
        publish_head(None, admin.server_port, LocalHead(key))
        assert cli.main(["replicas", "ls", "--url", f"http://{HERE}:{PORT}"]) == 0
        assert cli.main(["admin-key", "--url", f"http://{HERE}:{PORT}"]) == int(has_key_file)
    assert admin.asked == [("GET", "/omni/replicas", None if has_key_file else f"Bearer {key}")]


def test_a_head_without_a_place_for_its_key_says_so_and_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.admin.admin_keys.folder_paths", lambda: [tmp_path / "absent" / "folder"])
    assert len(publish_local_key(None, PORT)) > 32
    assert "--omni-admin-key-file" in caplog.text
    assert find_local_key(HERE, PORT) is None


def test_a_file_of_another_users_is_not_taken(folder: Path) -> None:
    publish_local_key(None, PORT)
    for path in folder.parent.rglob("*.key"):
        path.chmod(0o644)
    assert find_local_key(HERE, PORT) is None


@pytest.mark.parametrize(
    ("host", "url", "found"),
    [
        (None, f"http://127.0.0.1:{PORT}", True),
        ("0.0.0.0", f"http://127.0.0.1:{PORT}", True),
        ("localhost", f"http://localhost:{PORT}", True),
        ("::", f"http://[::1]:{PORT}", True),
        ("::", f"http://127.0.0.1:{PORT}", True),
        ("10.0.0.1", f"http://10.0.0.1:{PORT}", True),
        # Addresses at which another user may listen beside the head.
        (None, f"http://[::1]:{PORT}", False),
        (None, f"https://localhost:{PORT}", False),
        ("10.0.0.1", f"http://127.0.0.1:{PORT}", False),
        ("::1", f"http://127.0.0.1:{PORT}", False),
        (None, f"http://127.0.0.1:{PORT + 1}", False),
        (None, f"http://10.0.0.1:{PORT}", False),
        (None, "http://127.0.0.1", False),
        ("no such name", f"http://127.0.0.1:{PORT}", False),
    ],
)
def test_the_command_finds_the_key_by_the_address_at_which_only_the_head_can_listen(
    folder: Path, capsys: pytest.CaptureFixture[str], host: str | None, url: str, found: bool
) -> None:
    key = publish_local_key(host, PORT)
    assert cli.main(["admin-key", "--url", url]) == (0 if found else 1)
    printed = capsys.readouterr()
    assert printed.out == (f"{key}\n" if found else "")
    assert found or url in printed.err
