"""Admin keys: those in an operator's file, and the one that a head without a file keeps for commands of its own user.

The latter is in the user's folders, under the head's address, and new at each start: who listens at that address after
the head has ended, and is sent the key, can do nothing with it. There a head also says where its operator's routes are,
if they have a server of their own. Imports little, because the command `vllm-omni-plugin` reads this, too.
"""

import atexit
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.private_files import folder_paths, open_user_folder, read_key_file

logger = init_logger(__name__)

MIN_KEY_CHARS = 16
_DEFAULT_PORTS = {"http": 80, "https": 443}


class LocalHead(NamedTuple):
    """What a head keeps for commands of its own user.

    Attributes:
        key: "" if the operator gave keys.
        admin_url: of the server with the operator's routes; "" if they are at the head's own address.
    """

    key: str
    admin_url: str = ""


def read_admin_keys(path: str, flag: str) -> list[str]:
    """The keys in a file, one per non-empty line. Raises ConfigError."""
    place = f"argument {flag}: {path}"
    keys = read_key_file(path, place)
    if not keys:
        raise ConfigError(f"{place}: it has no key; give it one per line")
    for number, key in enumerate(keys, 1):
        if not key.isascii():
            raise ConfigError(f"{place}: key {number} is not ASCII, as a header requires")
        if len(key) < MIN_KEY_CHARS or " " in key or not key.isprintable():
            raise ConfigError(f"{place}: key {number} must have {MIN_KEY_CHARS} or more characters and no spaces")
    return keys


def new_local_key() -> str:
    return secrets.token_urlsafe(32)


def publish_local_key(host: str | None, port: int) -> str:
    """Return a new admin key that `find_local_key` finds until this process ends; see `publish_head`."""
    key = new_local_key()
    publish_head(host, port, LocalHead(key))
    return key


def publish_head(host: str | None, port: int, head: LocalHead) -> None:
    """Make `find_head` find this until this process ends. `host` and `port` are those of the head's flags.

    It is in each usable folder of `folder_paths`: a command may not have the head's environment, and a run-time
    directory may go when its user logs out.
    """
    text = "\n".join(head)
    names = [_file_name(address, port) for address in local_addresses(host)]
    paths, problems = [*folder_paths()], list[str]()
    for path in paths:
        try:
            with open_user_folder(path, create=True) as folder:
                for name in names:
                    folder.replace(name, text)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            atexit.register(_remove_at_exit, path, names, text, os.getpid())
    if len(problems) == len(paths):
        logger.warning(
            "This head's own admin key cannot be saved (%s), so vllm-omni-plugin does not find it. To change the "
            "fleet, start the head with --omni-admin-key-file.",
            "; ".join(problems),
        )


def find_local_key(host: str, port: int) -> str | None:
    """The admin key of this user's head that listens at this address of this machine, if it can be found."""
    head = find_head(host, port)
    return (head.key or None) if head is not None else None


def find_head(host: str, port: int) -> LocalHead | None:
    """What this user's head that listens at this address of this machine has published, if it can be found.

    Nobody else can listen there while that head does. So a name is not enough: it may stand for several addresses.
    """
    try:
        name = _file_name(str(ip_address(host)), port)
    except (ValueError, OSError):  # a name, or a machine without Linux, which runs no head
        return None
    for path in folder_paths():
        with suppress(OSError), open_user_folder(path) as folder:
            key, _, admin_url = folder.read(name).partition("\n")
            return LocalHead(key, admin_url)
    return None


def find_head_of(url: str) -> LocalHead | None:
    """As `find_head`, of the head at this HTTP address."""
    parts = urlsplit(url)
    try:
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
    except ValueError:
        return None
    return find_head(parts.hostname or "", port)


def local_addresses(host: str | None) -> tuple[str, ...]:
    """The addresses for commands on this machine, of a server with this `--host`. vLLM binds names to IPv4."""
    if host in (None, "", "0.0.0.0"):
        return ("127.0.0.1",)
    if host == "::":
        return ("127.0.0.1", "::1")
    with suppress(ValueError):
        return (str(ip_address(host)),)
    with suppress(OSError):
        return (socket.gethostbyname(host),)
    return ()


def _remove_at_exit(path: Path, names: Sequence[str], text: str, owner: int) -> None:
    """At exit, remove the files of this head, unless another head at this address has replaced them."""
    # A fork of this process runs its exit handlers too.
    if os.getpid() != owner:
        return
    for name in names:
        with suppress(OSError), open_user_folder(path) as folder:
            if folder.read(name) == text:
                folder.remove(name)


def _file_name(address: str, port: int) -> str:
    # Containers may share the folder, and each has such an address.
    return f"admin-{address}-{port}-{os.readlink('/proc/self/ns/net')}.key"
