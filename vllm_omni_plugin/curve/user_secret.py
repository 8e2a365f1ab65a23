"""The secret that all processes of one user share, for fleets on loopback, which other users can reach, too."""

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from vllm_omni_plugin.curve.secrets import FLAG
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

_NAME = "loopback.secret"


def user_secret() -> str:
    """Return this user's secret as a path, see `keep_in_memory`. Creates the secret if there is none.

    It is in the user's run-time directory or, without one, in the directory for temporary files. Folders that another
    user could have created are ignored. Raises `ConfigError` without a usable folder.
    """
    problems: list[str] = []
    usable = [folder for folder in _folders() if _is_usable(folder, problems)]
    for path in (folder / _NAME for folder in usable):
        with suppress(FileNotFoundError):
            return keep_in_memory(path.read_text())
    for folder in usable:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _make(folder / _NAME)
            return keep_in_memory((folder / _NAME).read_text())
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise ConfigError(
        f"there is no place for the secret of links on loopback ({'; '.join(problems)}): give all processes of the "
        f"fleet the same {FLAG}, or accept that every user here can use and harm it, with --omni-insecure"
    )


def new_secret() -> str:
    """Return a new random secret as a path, see `keep_in_memory`."""
    return keep_in_memory(secrets.token_urlsafe(32))


@cache
def keep_in_memory(secret: str) -> str:
    """Return a path at which this user's processes can read the secret while this process lives.

    The file in the run-time or temporary directory may be deleted while the process runs.
    """
    descriptor = os.memfd_create("omni-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _folders() -> Iterator[Path]:
    user = os.geteuid()
    # The variable is set in a login session, but not for the user's services, which need the same secret.
    for runtime in dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}", f"/run/user/{user}")):
        with suppress(OSError):
            if os.stat(runtime).st_uid == user:
                yield Path(runtime, "vllm-omni-plugin")
    yield Path(tempfile.gettempdir(), f"vllm-omni-plugin-{user}")


def _is_usable(folder: Path, problems: list[str]) -> bool:
    """Whether a folder is private to this user, or does not exist yet."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
        return False
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & 0o077:
        return True
    problems.append(
        f"{folder} must be a folder of this user's with mode 0700, not of user {found.st_uid} with {mode:04o}"
    )
    logger.warning("%s: the secret of links on loopback is not looked for there.", problems[-1])
    return False


def _make(path: Path) -> None:
    # First under another name, so that concurrent processes never read half a secret. The first link wins.
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
