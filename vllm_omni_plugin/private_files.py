"""Files that only one user may read: key files, and the folder that all processes of a user share. Imports little."""

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_omni_plugin.errors import ConfigError

_MAX_FILE_BYTES = 65_536


def read_key_file(path: str | Path, place: str, private: bool = False) -> list[str]:
    """Return the lines of a UTF-8 file, stripped and without empty ones.

    A `private` file must belong to this user alone. Raises ConfigError, which names the `place` where the path was
    given, if the file is unreadable, not regular, larger than 64 KiB, not UTF-8, or not private.
    """
    # Non-blocking, because opening a named pipe would wait for a writer.
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            fault = _fault(os.fstat(file.fileno()), private)
            if fault:
                raise ConfigError(f"{place}: {fault}")
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{place}: it is larger than {_MAX_FILE_BYTES} bytes")
        lines = content.decode().split("\n")
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: it is not UTF-8 text") from error
    return [line.strip() for line in lines if line.strip()]


def _fault(found: os.stat_result, private: bool) -> str:
    """Why a secret's file is not used: no regular file, another owner's, or readable by others."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if private and found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to the one running this process"
    if private and found.st_mode & 0o077:
        return f"others may access it (mode {stat.S_IMODE(found.st_mode):04o}); run `chmod 600` on it"
    return ""


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Non-blocking, because opening a named pipe would wait for a writer.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def folder_paths() -> Iterator[Path]:
    """Where the folder may be, best place first: the user's run-time directory, the directory for temporary files."""
    user = os.geteuid()
    # The variable is set in a login session, but not for the user's services, which need the same folder.
    for runtime in dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}", f"/run/user/{user}")):
        with suppress(OSError):
            if os.stat(runtime).st_uid == user:
                yield Path(runtime, "vllm-omni-plugin")
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # none is writable
        temporary = "/tmp"
    yield Path(temporary, f"vllm-omni-plugin-{user}")


class UserFolder:
    """The folder, open. Files are named without a path. Every method may raise `OSError`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, name: str) -> str:
        """The text of a file. Raises `PermissionError` if it is not a file of this user's that only he can access."""
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=self._descriptor)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            _require_private(descriptor, stat.S_ISREG, f"file {name}", 0o600)
            return file.read()

    def create(self, name: str, text: str) -> None:
        """Create a file with this text, unless there is one. Nobody reads half of it."""
        with self._draft(text) as draft, suppress(FileExistsError):
            os.link(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def replace(self, name: str, text: str) -> None:
        """Create a file with this text, in place of one that may be there. Nobody reads half of it."""
        with self._draft(text) as draft:
            os.rename(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def _draft(self, text: str) -> Iterator[str]:
        """A file with this text under a name of its own, which ends in any case."""
        name = f"draft-{secrets.token_hex(8)}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._descriptor)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            yield name
        finally:
            # After a rename there is none, and another error would hide the first one.
            with suppress(OSError):
                self.remove(name)


@contextmanager
def open_user_folder(path: Path, create: bool = False) -> Iterator[UserFolder]:
    """The folder at one of `folder_paths`.

    Raises FileNotFoundError if there is none, PermissionError if it is not this user's alone, or another OSError.
    """
    if create:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        fault = "it must be a folder of this user's with mode 0700, not a link or a file"
        raise PermissionError(error.errno, fault) from error
    try:
        _require_private(descriptor, stat.S_ISDIR, "folder", 0o700)
        yield UserFolder(descriptor)
    finally:
        os.close(descriptor)


def _require_private(descriptor: int, is_kind: Callable[[int], bool], kind: str, mode: int) -> None:
    """Refuse a folder or file that is not this user's own, or open to others."""
    found = os.fstat(descriptor)
    found_mode = stat.S_IMODE(found.st_mode)
    if is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found_mode & 0o077:
        return
    must = f"it must be a {kind} of this user's with mode {mode:04o}"
    raise PermissionError(errno.EACCES, f"{must}, not of user {found.st_uid} with {found_mode:04o}")
