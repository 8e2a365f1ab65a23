"""Admin keys: those in an operator's file, and the one that a head without a file keeps for commands of its own user.

The latter is in the user's folder, under the head's port, and new at each start: who listens on that port after the
head has ended, and is sent the key, can do nothing with it. Imports little, because the command `vllm-omni-plugin`
reads keys, too.
"""

import atexit
import os
import secrets
from contextlib import suppress

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.key_file import read_key_file
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.user_folder import folder_paths, open_user_folder

logger = init_logger(__name__)

MIN_KEY_CHARS = 16


def read_admin_keys(path: str, flag: str) -> list[str]:
    """The keys in a file, one per non-empty line. Raises ConfigError if the file or a key is unusable."""
    place = f"argument {flag}: {path}"
    keys = read_key_file(path, place)
    if not keys:
        raise ConfigError(f"{place}: it has no key; give it one per line")
    for number, key in enumerate(keys, 1):
        if not key.isascii():
            raise ConfigError(f"{place}: key {number} is not ASCII, as a header requires")
        if len(key) < MIN_KEY_CHARS or " " in key or not key.isprintable():
            raise ConfigError(f"{place}: key {number} is not {MIN_KEY_CHARS} or more characters without spaces")
    return keys


def publish_local_key(port: int) -> str:
    """Return a new admin key that `find_local_key` finds until this process ends."""
    key = secrets.token_urlsafe(32)
    problems: list[str] = []
    for path in folder_paths():
        try:
            with open_user_folder(path, create=True) as folder:
                folder.replace(_file_name(port), key)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            atexit.register(_remove, port, key, os.getpid())
            return key
    logger.warning(
        "There is no place for the admin key of this head's user (%s): vllm-omni-plugin cannot change the fleet "
        "without --omni-admin-key-file.",
        "; ".join(problems),
    )
    return key


def find_local_key(port: int) -> str | None:
    """The admin key of this user's head that serves HTTP on this port of this machine, if it can be found."""
    for path in folder_paths():
        with suppress(OSError), open_user_folder(path) as folder:
            return folder.read(_file_name(port))
    return None


def _remove(port: int, key: str, owner: int) -> None:
    # A fork of this process runs its exit handlers too.
    if os.getpid() != owner:
        return
    for path in folder_paths():
        with suppress(OSError), open_user_folder(path) as folder:
            # Not that of a head that was started on this port since.
            if folder.read(_file_name(port)) == key:
                folder.remove(_file_name(port))


def _file_name(port: int) -> str:
    return f"admin-{port}.key"
