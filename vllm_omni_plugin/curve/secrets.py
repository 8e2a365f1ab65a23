"""The secret file, and the CURVE keys that follow from it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
