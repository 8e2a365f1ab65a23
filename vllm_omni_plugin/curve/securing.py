"""How a socket is told to demand, or to show, a key."""

import errno
from typing import Any

import zmq

from vllm_omni_plugin.curve.secrets import FLAG, Secrets

PLAIN_USERNAME = "head"
"""Of data sockets without encryption, where the credential is the password."""

HANDSHAKE_MS = 2000
"""How long a server waits for a peer's handshake, and so how long a connection that says nothing lasts."""

HANDSHAKE_FRAME_BYTES = 512
"""The largest frame of a handshake has some 300: enough for a socket that gets nothing else."""

CURVE_BYTES = 64
"""What encryption adds to a frame, at most."""

Socket = zmq.Socket[Any]


def secure_server(socket: Socket, secrets: Secrets | None, role: str) -> None:
    """Let a socket serve holders of a secret only, as the domain ``role`` of its context's gate. Call before bind."""
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
    _ask_the_gate(socket, domain)


def require_password(socket: Socket, domain: str) -> None:
    """Let a socket serve only those that show a password of a domain, unencrypted, as `PLAIN_USERNAME`."""
    socket.plain_server = True
    _ask_the_gate(socket, domain)


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


def _ask_the_gate(socket: Socket, domain: str) -> None:
    socket.zap_domain = domain.encode()
    # Without it everybody would be let in while the context has no gate.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
