"""The secret that the processes of one user share unasked, for fleets on loopback, which others reach as well."""

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_omni_plugin.curve.secrets import FLAG, OWN_SECRET_NAME
from vllm_omni_plugin.errors import ConfigError


def own_secret_file() -> str:
    """The path of this user's secret, which is made if there is none. Safe against others and against races.

    It lies in the user's run-time directory or, where there is none, in the directory for temporary files; one that
    exists in the other of them is used.

    Raises:
        ConfigError: it can be made nowhere, or somebody else could have put something there. Says what to do.
    """
    folders = list(_folders())
    for folder in folders:
        if (folder / OWN_SECRET_NAME).exists():
            _require_own(folder)
            return str(folder / OWN_SECRET_NAME)
    for number, folder in enumerate(folders, 1):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(folder)
            _make(folder / OWN_SECRET_NAME)
        except OSError as error:
            if number == len(folders):
                raise ConfigError(
                    f"no secret for links on loopback can be made in {folder} ({error.strerror}): give all processes "
                    f"of the fleet the same {FLAG}, or accept that every user here can use and harm it, with "
                    "--omni-insecure"
                ) from error
        else:
            return str(folder / OWN_SECRET_NAME)
    raise AssertionError("there is always a directory for temporary files")


def _folders() -> Iterator[Path]:
    user = os.geteuid()
    # Set in a login session, but not for the same user's services, which shall find the same secret.
    for runtime in dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}", f"/run/user/{user}")):
        with suppress(OSError):
            if os.stat(runtime).st_uid == user:
                yield Path(runtime, "vllm-omni-plugin")
    yield Path(tempfile.gettempdir(), f"vllm-omni-plugin-{user}")


def _require_own(folder: Path) -> None:
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"{folder}: the secret of links on loopback lies there, so it must be a folder of this user's with mode "
            f"0700; it belongs to user {found.st_uid} and has mode {mode:04o}. Remove it, or give {FLAG}"
        )


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
