"""The secret file, the CURVE keys that follow from it, and sockets that demand or show them."""

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.key_file import read_key_file

FLAG = "--omni-secret-file"
MIN_SECRET_CHARS = 16
MAX_SECRETS = 2
# What scrypt's authors recommend for interactive use: a guess costs an eavesdropper about 50 ms and 16 MiB.
_SCRYPT_COST = {"n": 2**14, "r": 8, "p": 1}
_SALT = b"vllm-omni-plugin link keys 1"
PLAIN_USERNAME = "head"
"""Of data sockets without encryption, where the credential is the password."""
HANDSHAKE_MS = 2000
"""How long a server waits for a peer's handshake, and so how long a connection that says nothing lasts."""
HANDSHAKE_FRAME_BYTES = 512
"""The largest frame of a handshake has some 300: enough for a socket that gets nothing else."""
CURVE_BYTES = 64
"""What encryption adds to a frame, at most."""
Socket = zmq.Socket[Any]


class KeyPair(NamedTuple):
    """One CURVE key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes


class Secrets:
    """What the lines of a secret file give: keys, never the lines themselves. Immutable.

    The first is the one this end serves with; the peers of all of them are accepted and tried.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        """Derive from one or two secrets of at least 16 characters; `ConfigError` if they are others."""
        if not 1 <= len(lines) <= MAX_SECRETS:
            raise ConfigError(f"{FLAG}: it must hold one or two secrets, one per line, not {len(lines)}")
        if any(len(line) < MIN_SECRET_CHARS for line in lines):
            raise ConfigError(f"{FLAG}: a secret must have at least {MIN_SECRET_CHARS} characters")
        # Slow on purpose, because the handshakes of an eavesdropped link would let short secrets be guessed.
        self._masters = [hashlib.scrypt(line.encode(), salt=_SALT, dklen=32, **_SCRYPT_COST) for line in lines]

    def __repr__(self) -> str:
        return f"<Secrets [{self.count}]>"

    @classmethod
    def from_file(cls, path: str | Path) -> "Secrets":
        """Read a file with one secret per line that is not empty.

        Raises:
            ConfigError: It cannot be read, is no regular file, belongs to another user, may be read by others, or
                holds anything but one or two secrets of at least 16 characters.
        """
        secrets = read_key_file(path, f"{FLAG} {path}", private=True)
        if not secrets:
            raise ConfigError(f"{FLAG} {path}: it is empty")
        try:
            return cls(secrets)
        except ConfigError as error:
            raise ConfigError(str(error).replace(FLAG, f"{FLAG} {path}", 1)) from error

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._masters)

    def server_keys(self, role: str) -> KeyPair:
        """Return the keys this end serves with."""
        return self._keys(0, "server", role)

    def peer_server_key(self, role: str, attempt: int) -> bytes:
        """Return the public key of a server whose first secret is the one number ``attempt`` (modulo `count`) here."""
        return self._keys(attempt, "server", role).public

    def client_keys(self, role: str, attempt: int) -> KeyPair:
        """Return the keys of a client that uses the secret number ``attempt`` (modulo `count`)."""
        return self._keys(attempt, "client", role)

    def _keys(self, attempt: int, end: str, role: str) -> KeyPair:
        master = self._masters[attempt % self.count]
        secret = z85.encode(hashlib.blake2b(f"{end} {role}".encode(), key=master, digest_size=32).digest())
        return KeyPair(zmq.curve_public(secret), secret)


def secure_server(socket: Socket, secrets: Secrets | None, role: str) -> None:
    """Let a socket serve holders of a secret only, in the ZAP domain ``role``. Call before bind."""
    if secrets is not None:
        require_key(socket, secrets.server_keys(role).secret, role)


def secure_client(socket: Socket, secrets: Secrets | None, role: str, attempt: int = 0) -> None:
    """Let a socket connect as a holder of the secret number ``attempt`` (modulo their number). Call before connect."""
    if secrets is not None:
        socket.curve_publickey, socket.curve_secretkey = secrets.client_keys(role, attempt)
        socket.curve_serverkey = secrets.peer_server_key(role, attempt)


def require_key(socket: Socket, secret_key: bytes, domain: str) -> None:
    """Let a socket serve the CURVE keys admitted to a domain; ``secret_key`` (Z85) is its own secret key."""
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    _require_zap(socket, domain)


def require_password(socket: Socket, domain: str) -> None:
    """Let a socket serve only those that show a password of a domain, unencrypted, as `PLAIN_USERNAME`."""
    socket.plain_server = True
    _require_zap(socket, domain)


def why_refused(event: int, value: int, secrets: Secrets | None) -> str:
    """Return for the operator of a client why its handshake failed, from a socket monitor's event and value."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
        return "it did not answer the handshake in time"
    # Ends that authenticate differently both see it; the one that is told of it second sees the connection end.
    if secrets is None:
        return f"refused secret: it seems to demand one, and none was given here with {FLAG}"
    return (
        f"refused secret: it serves without one, or with one that is not in the file given here with {FLAG} (links on "
        "loopback have one of their user's own where none is given)"
    )


def _require_zap(socket: Socket, domain: str) -> None:
    socket.zap_domain = domain.encode()
    # Without it everybody would be let in while the context has no ZAP handler.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
