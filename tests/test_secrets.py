"""The secret file, and the keys that follow from it."""

import os
from pathlib import Path

import pytest
import zmq

from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError

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
        with pytest.raises(ConfigError, match=f"--omni-secret-file .*mode {mode:04o}.*chmod 600"):
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
    with pytest.raises(ConfigError, match=f"--omni-secret-file {path}: .*{problem}") as caught:
        Secrets.from_file(path)
    assert OLD not in str(caught.value)


def test_file_that_is_missing_or_not_regular_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--omni-secret-file .*No such file"):
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
