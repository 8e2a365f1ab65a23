"""The secret file with the keys that follow from it, and the secret that fleets on loopback create."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import Secrets, user_secret
from vllm_omni_plugin.curve.secrets import keep_in_memory
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.options.flag_rules import check
from vllm_omni_plugin.integration.options.listening import with_secret
from vllm_omni_plugin.private_files import UserFolder, folder_paths, open_user_folder

FOLDER = f"vllm-omni-plugin-{os.geteuid()}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a user without a run-time directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(os, "stat", lambda path, **other: _stat(path, **other))
    return tmp_path


def _stat(path: object, real: object = os.stat, **other: object) -> os.stat_result:
    if str(path).startswith("/run/user/"):
        raise FileNotFoundError(path)
    return real(path, **other)  # type: ignore[operator, no-any-return]


def secret_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_secret_is_created_private_and_found_again(temporary: Path) -> None:
    found = user_secret()
    path = secret_in(temporary / FOLDER)
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
    assert Path(found).read_bytes() == path.read_bytes()
    assert Secrets.from_file(found).count == 1
    assert user_secret() == found


def test_a_full_disk_leaves_no_draft(temporary: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            user_secret()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((temporary / FOLDER).iterdir()) == []


@pytest.mark.parametrize("write", [UserFolder.create, UserFolder.replace])
def test_a_text_that_cannot_be_written_leaves_no_draft(
    tmp_path: Path, write: Callable[[UserFolder, str, str], None]
) -> None:
    with open_user_folder(tmp_path / "folder", create=True) as folder, pytest.raises(UnicodeEncodeError):
        write(folder, "name", "\ud800")
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "folder" / "name").mkdir()
    with open_user_folder(tmp_path / "folder") as folder, pytest.raises(IsADirectoryError):
        folder.replace("name", "text")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["name"]


def test_a_draft_that_cannot_be_removed_does_not_hide_why_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **other: Any) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    with open_user_folder(tmp_path / "folder", create=True) as folder, pytest.raises(UnicodeEncodeError):
        folder.create("name", "\ud800")


def test_without_a_writable_temporary_directory_the_usual_one_is_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert [*folder_paths()] == [Path("/tmp", FOLDER)]


def test_the_secret_is_readable_after_its_file_was_deleted(temporary: Path) -> None:
    found = user_secret()
    path = secret_in(temporary / FOLDER)
    content = path.read_text()
    shutil.rmtree(path.parent)
    read = "import sys; from vllm_omni_plugin.curve import Secrets; print(Secrets.from_file(sys.argv[1]).count)"
    child = subprocess.run([sys.executable, "-c", read, found], capture_output=True, text=True, check=True)
    assert child.stdout == "1\n"
    assert user_secret() != found
    assert Path(found).read_text() == content


def test_concurrent_processes_create_one_secret(temporary: Path) -> None:
    with ThreadPoolExecutor(16) as many:
        found = set(many.map(lambda _: Path(user_secret()).read_bytes(), range(64)))
    assert len(found) == 1
    assert secret_in(temporary / FOLDER).read_bytes() in found


def test_the_secret_is_in_the_run_time_directory_if_there_is_one(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Path(user_secret()).read_bytes() == secret_in(tmp_path / "vllm-omni-plugin").read_bytes()
    assert not (temporary / FOLDER).exists()


@pytest.mark.parametrize("fault", ["others may look", "others may write", "link", "of another user"])
def test_a_folder_that_is_not_this_users_alone_is_refused(temporary: Path, fault: str) -> None:
    folder = temporary / FOLDER
    folder.mkdir(mode=0o700)
    if fault == "link":
        folder.rename(temporary / "elsewhere")
        folder.symlink_to(temporary / "elsewhere")
    elif fault == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root may give a folder away")
        os.chown(folder, 1, 1)
    else:
        folder.chmod(0o701 if fault == "others may look" else 0o770)
    with pytest.raises(ConfigError, match=f"{FOLDER}: it must be a folder of this user's"):
        user_secret()


def test_a_folder_that_is_exchanged_after_the_check_gives_no_secret(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(user_secret()).read_text()
    foreign = temporary / "foreign"
    foreign.mkdir(mode=0o777)
    (foreign / "loopback.secret").write_text("everybody knows this secret")

    def exchange(check: Any) -> Any:
        def checked(place: Any, **other: Any) -> os.stat_result:
            found: os.stat_result = check(place, **other)
            if foreign.exists() and stat.S_ISDIR(found.st_mode):
                (temporary / FOLDER).rename(temporary / "before")
                foreign.rename(temporary / FOLDER)
            return found

        return checked

    monkeypatch.setattr(os, "lstat", exchange(os.lstat))
    monkeypatch.setattr(os, "fstat", exchange(os.fstat))
    keep_in_memory.cache_clear()
    assert Path(user_secret()).read_text() == own
    assert not foreign.exists()


@pytest.mark.parametrize("fault", ["others may read it", "link", "folder"])
def test_a_file_that_is_not_this_users_alone_is_refused(temporary: Path, fault: str) -> None:
    user_secret()
    path = secret_in(temporary / FOLDER)
    if fault == "others may read it":
        path.chmod(0o644)
    else:
        path.rename(temporary / "elsewhere")
        path.symlink_to(temporary / "elsewhere") if fault == "link" else path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=FOLDER):
        user_secret()


@pytest.mark.parametrize("trouble", ["foreign", "out of reach"])
def test_files_of_others_in_the_temporary_directory_do_not_matter_with_a_run_time_directory(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (temporary / FOLDER).mkdir(mode=0o777)
    (temporary / FOLDER).chmod(0o777)
    if trouble == "out of reach":
        own_open = os.open

        def open_other(path: Any, *arguments: Any, **other: Any) -> int:
            if isinstance(path, Path) and path.name == FOLDER:
                raise PermissionError(13, "Permission denied", str(path))
            return own_open(path, *arguments, **other)

        monkeypatch.setattr(os, "open", open_other)
    assert Path(user_secret()).read_bytes() == secret_in(tmp_path / "vllm-omni-plugin").read_bytes()


LOOPBACK = OmniConfig(master_address="127.0.0.1", master_port=1)
NETWORK = OmniConfig(join=True, master_address="10.0.0.1")


def test_links_on_loopback_use_the_user_secret(temporary: Path) -> None:
    for address in ("127.0.0.1", "127.1.2.3", "::1"):
        assert with_secret(LOOPBACK, address).secret_file == user_secret()


@pytest.mark.parametrize("flags", [{"insecure": True}, {"secret_file": "given"}])
def test_links_with_other_flags_do_not_use_the_user_secret(temporary: Path, flags: dict[str, object]) -> None:
    options = OmniConfig(master_address="127.0.0.1", master_port=1, **flags)  # type: ignore[arg-type]
    assert with_secret(options, "127.0.0.1") is options
    assert not os.listdir(temporary)


@pytest.mark.parametrize("flags", [{"insecure": True}, {"max_message_size": 64}])
def test_flags_of_links_go_with_several_api_servers_of_a_fleet_that_nobody_joins(flags: dict[str, object]) -> None:
    options = OmniConfig(**flags)  # type: ignore[arg-type]
    check(options, flags, headless=False, api_servers=2)
    with pytest.raises(ConfigError, match="several API servers"):
        check(options, flags, headless=False, api_servers=1)


def test_links_beyond_loopback_do_not_use_the_user_secret(temporary: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        with_secret(LOOPBACK, "10.0.0.1")
    # The head that is joined decides whether a secret is required.
    assert with_secret(NETWORK, "10.0.0.1") is NETWORK


OLD, NEW, OTHER = "the old secret of the fleet", "the new secret of the fleet", "somebody else's secret"


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_file_gives_one_secret_per_line_that_is_not_empty(tmp_path: Path) -> None:
    secrets = Secrets.from_file(secret_file(tmp_path, f"\n  {OLD}\r\n\n{NEW}\n".encode()))
    assert secrets.count == 2
    assert secrets.server_keys("a") == Secrets([OLD, NEW]).server_keys("a")


def test_only_a_file_that_others_cannot_access_is_accepted(tmp_path: Path) -> None:
    for mode in (0o604, 0o640, 0o620, 0o602, 0o610, 0o644, 0o666):
        with pytest.raises(ConfigError, match=f"argument --omni-secret-file: .*mode {mode:04o}.*chmod 600"):
            Secrets.from_file(secret_file(tmp_path, OLD.encode(), mode))
    for mode in (0o600, 0o700, 0o400):
        assert Secrets.from_file(secret_file(tmp_path, OLD.encode(), mode)).count == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(b" \n\n\t\n", "it is empty", id="blank"),
        pytest.param(b"too short", "at least 16 characters", id="short"),
        pytest.param(f"{OLD}\nshort".encode(), "at least 16 characters", id="second short"),
        pytest.param(f"{OLD}\n{NEW}\n{OTHER}".encode(), "one or two secrets.*not 3", id="three"),
        pytest.param(b"\xff" * 32, "not UTF-8", id="binary"),
        pytest.param(b"x" * 70_000, "larger than 65536 bytes", id="large"),
    ],
)
def test_file_with_other_content_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = secret_file(tmp_path, content)
    with pytest.raises(ConfigError, match=f"argument --omni-secret-file: {path}: .*{problem}") as caught:
        Secrets.from_file(path)
    assert OLD not in str(caught.value)


def test_file_that_is_missing_or_not_regular_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"argument --omni-secret-file: .*: No such file"):
        Secrets.from_file(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match=r"not a regular file|Is a directory"):
            Secrets.from_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path, OLD.encode())
    os.chown(path, 1, 1)
    with pytest.raises(ConfigError, match="belongs to user 1"):
        Secrets.from_file(path)


def test_errors_and_repr_do_not_contain_the_secret() -> None:
    assert repr(Secrets([OLD])) == "<Secrets [1]>"
    assert OLD not in str(vars(Secrets([OLD])))


def test_keys_differ_by_secret_role_and_end() -> None:
    first, second = Secrets([OLD]), Secrets([NEW])
    pairs = [
        keys
        for secrets in (first, second)
        for role in ("coordinator", "replica")
        for keys in (secrets.server_keys(role), secrets.client_keys(role, 0))
    ]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 8
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in pairs)
