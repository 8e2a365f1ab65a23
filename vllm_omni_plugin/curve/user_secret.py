"""The secret that all processes of one user share, for fleets on loopback, which other users can reach, too."""

import os
import secrets
from functools import cache
from pathlib import Path

from vllm_omni_plugin.curve.secrets import FLAG
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.user_folder import folder_paths, open_user_folder

logger = init_logger(__name__)

_NAME = "loopback.secret"


def user_secret() -> str:
    """Return this user's secret, created if there is none, as a path (see `keep_in_memory`). Raises `ConfigError`."""
    problems: list[str] = []
    usable: list[Path] = []
    for path in folder_paths():
        try:
            with open_user_folder(path) as folder:
                return keep_in_memory(folder.read(_NAME))
        except FileNotFoundError:
            usable.append(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            logger.warning("%s: the secret of links on loopback is not looked for there.", problems[-1])
    for path in usable:
        try:
            with open_user_folder(path, create=True) as folder:
                folder.create(_NAME, secrets.token_urlsafe(32))
                return keep_in_memory(folder.read(_NAME))
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    raise ConfigError(
        f"there is no place for the secret of links on loopback ({'; '.join(problems)}): give all processes of the "
        f"fleet the same {FLAG}, or accept that every user here can use and harm it, with --omni-insecure"
    )


def new_secret() -> str:
    """Return a new random secret as a path, see `keep_in_memory`."""
    return keep_in_memory(secrets.token_urlsafe(32))


@cache
def keep_in_memory(secret: str) -> str:
    """Return a path, for this user's processes, of a copy that nobody can delete while this process lives."""
    descriptor = os.memfd_create("omni-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
