"""The secret that the processes of one user share unasked, for fleets on loopback, which others reach as well."""

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
    """This user's secret, which is made if there is none; as a path that this process keeps, see `kept`.

    It lies in the user's run-time directory or, where there is none, in the directory for temporary files; one that
    exists in the other of them is used. A folder that others could have prepared is passed over.

    Raises:
        ConfigError: there is no folder for it. Says what to do.
    """
    troubles: list[str] = []
    usable = [folder for folder in _folders() if _is_usable(folder, troubles)]
    for path in (folder / _NAME for folder in usable):
        with suppress(FileNotFoundError):
            return kept(path.read_text())
    for folder in usable:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _make(folder / _NAME)
            return kept((folder / _NAME).read_text())
        except OSError as error:
            troubles.append(f"{folder}: {error.strerror}")
    raise ConfigError(
        f"there is no place for the secret of links on loopback ({'; '.join(troubles)}): give all processes of the "
        f"fleet the same {FLAG}, or accept that every user here can use and harm it, with --omni-insecure"
    )


def new_secret() -> str:
    """A secret that nobody else has, as a path; see `kept`."""
    return kept(secrets.token_urlsafe(32))


@cache
def kept(secret: str) -> str:
    """A path under which this user's processes can read a secret for as long as this one lives, whatever is deleted.

    The user's run-time directory goes away with the last session, and temporary files are cleaned up.
    """
    descriptor = os.memfd_create("omni-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _folders() -> Iterator[Path]:
    user = os.geteuid()
    # Set in a login session, but not for the same user's services, which shall find the same secret.
    for runtime in dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}", f"/run/user/{user}")):
        with suppress(OSError):
            if os.stat(runtime).st_uid == user:
                yield Path(runtime, "vllm-omni-plugin")
    yield Path(tempfile.gettempdir(), f"vllm-omni-plugin-{user}")


def _is_usable(folder: Path, troubles: list[str]) -> bool:
    """Whether a folder is ours alone, or not there yet."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        troubles.append(f"{folder}: {error.strerror}")
        return False
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not mode & 0o077:
        return True
    troubles.append(
        f"{folder} must be a folder of this user's with mode 0700, not of user {found.st_uid} with {mode:04o}"
    )
    logger.warning("%s: the secret of links on loopback is not looked for there.", troubles[-1])
    return False


def _make(path: Path) -> None:
    # Under another name first: whoever comes at the same time shall not find half of it, and the first one wins.
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
