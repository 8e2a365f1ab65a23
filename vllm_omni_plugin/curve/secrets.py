"""The secret file, and the CURVE keys that follow from it."""

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from vllm_omni_plugin.errors import ConfigError

FLAG = "--omni-secret-file"
MIN_SECRET_CHARS = 16
MAX_SECRETS = 2
_MAX_FILE_BYTES = 4096
# What scrypt's authors recommend for interactive use: a guess costs an eavesdropper about 50 ms and 16 MiB.
_SCRYPT_COST = {"n": 2**14, "r": 8, "p": 1}
_SALT = b"vllm-omni-plugin link keys 1"


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
        try:
            lines = _read_private(path).decode().split("\n")
        except OSError as error:
            raise ConfigError(f"{FLAG} {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{FLAG} {path}: it is not UTF-8 text") from error
        secrets = [line.strip() for line in lines if line.strip()]
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


def _read_private(path: str | Path) -> bytes:
    # Not blocking, because the open of a named pipe waits for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{FLAG} {path}: it is not a regular file")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{FLAG} {path}: it belongs to user {found.st_uid}, not to the one running this process")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"{FLAG} {path}: others may access it (mode {mode:04o}); run `chmod 600` on it")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{FLAG} {path}: it is larger than {_MAX_FILE_BYTES} bytes")
    return content
