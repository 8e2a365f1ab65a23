"""Secret files, one of which all processes of a user share, the CURVE keys derived from them, and sockets with these.

The end that binds a socket is its CURVE server: the coordinator, or a replica server.
"""

import errno
import hashlib
import os
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.private_files import folder_paths, open_user_folder, read_key_file

FLAG = "--omni-secret-file"
MIN_SECRET_CHARS = 16
MAX_SECRETS = 2
# The recommendation of scrypt's authors for interactive use: each guess costs about 50 ms and 16 MiB.
_SCRYPT_COST = {"n": 2**14, "r": 8, "p": 1}
_SALT = b"vllm-omni-plugin link keys 1"
# On data sockets without encryption, where the password is the credential.
PLAIN_USERNAME = "head"
# Timeout of a server for a peer's handshake.
HANDSHAKE_MS = 2000
# The largest frame of a handshake has about 300 bytes.
HANDSHAKE_FRAME_BYTES = 512
# Added to a frame by encryption, at most.
CURVE_BYTES = 64
Socket = zmq.Socket[Any]

logger = init_logger(__name__)
# The secret of fleets on loopback, which other users can reach, too.
_NAME = "loopback.secret"


class KeyPair(NamedTuple):
    """One CURVE key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes


class Secrets:
    """Keys derived from one or two secrets. Does not keep the secrets themselves. Immutable.

    A server uses the first secret and admits clients with either. A client tries both, see `CoordinatorLink` and
    `open_control_link`.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        """Raises `ConfigError` unless there are one or two secrets of at least 16 characters."""
        if not 1 <= len(lines) <= MAX_SECRETS:
            raise ConfigError(f"{FLAG}: it must hold one or two secrets, one per line, not {len(lines)}")
        if any(len(line) < MIN_SECRET_CHARS for line in lines):
            raise ConfigError(f"{FLAG}: a secret must have at least {MIN_SECRET_CHARS} characters")
        # Slow on purpose: with an eavesdropped handshake, short secrets could be guessed otherwise.
        self._masters = [hashlib.scrypt(line.encode(), salt=_SALT, dklen=32, **_SCRYPT_COST) for line in lines]

    def __repr__(self) -> str:
        return f"<Secrets [{self.count}]>"

    @classmethod
    def from_file(cls, path: str | Path) -> "Secrets":
        """Read a private file with one secret per line. Raises `ConfigError` for a bad file or invalid secrets."""
        place = f"argument {FLAG}: {path}"
        secrets = read_key_file(path, place, private=True)
        if not secrets:
            raise ConfigError(f"{place}: it is empty")
        try:
            return cls(secrets)
        except ConfigError as error:
            raise ConfigError(str(error).replace(FLAG, place, 1)) from error

    @property
    def count(self) -> int:
        return len(self._masters)

    def server_keys(self, role: str) -> KeyPair:
        return self._keys(0, "server", role)

    def peer_server_key(self, role: str, attempt: int) -> bytes:
        """The public key of a server that uses the secret number ``attempt``, modulo `count`; as in `client_keys`."""
        return self._keys(attempt, "server", role).public

    def client_keys(self, role: str, attempt: int) -> KeyPair:
        return self._keys(attempt, "client", role)

    def _keys(self, attempt: int, end: str, role: str) -> KeyPair:
        master = self._masters[attempt % self.count]
        secret = z85.encode(hashlib.blake2b(f"{end} {role}".encode(), key=master, digest_size=32).digest())
        return KeyPair(zmq.curve_public(secret), secret)


def secure_server(socket: Socket, secrets: Secrets | None, role: str) -> None:
    """Make a server socket require a secret, in the ZAP domain ``role``. Call before bind."""
    if secrets is not None:
        require_key(socket, secrets.server_keys(role).secret, role)


def secure_client(socket: Socket, secrets: Secrets | None, role: str, attempt: int = 0) -> None:
    """Make a client socket use the secret number ``attempt`` (modulo their number). Call before connect."""
    if secrets is not None:
        socket.curve_publickey, socket.curve_secretkey = secrets.client_keys(role, attempt)
        socket.curve_serverkey = secrets.peer_server_key(role, attempt)


def require_key(socket: Socket, secret_key: bytes, domain: str) -> None:
    """Make a server socket require a CURVE key admitted to ``domain``. ``secret_key`` (Z85) is its own secret key."""
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    _require_zap(socket, domain)


def require_password(socket: Socket, domain: str) -> None:
    """Make a server socket require a password admitted to ``domain``, for `PLAIN_USERNAME`, without encryption."""
    socket.plain_server = True
    _require_zap(socket, domain)


def why_refused(event: int, value: int, secrets: Secrets | None) -> str:
    """Explain to a client's operator why its handshake failed, from a monitor's event and value."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
        return "it did not answer the handshake in time"
    if secrets is None:
        refusal = f"refused secret: it seems to demand one, and none was given here with {FLAG}"
    else:
        refusal = (
            f"refused secret: it serves without one, or with one that is not in the file given here with {FLAG} "
            "(without that flag, links on loopback use a secret of the user)"
        )
    # A peer that refuses a secret, or notices different mechanisms first, may only end the connection, as one that is
    # killed does.
    is_known = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    return refusal if is_known else f"it ended the connection in the handshake; if that goes on: {refusal}"


def _require_zap(socket: Socket, domain: str) -> None:
    socket.zap_domain = domain.encode()
    # Without it libzmq would admit everybody while the context has no ZAP handler.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


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
            logger.warning("The secret of links on loopback is not read from %s.", problems[-1])
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
