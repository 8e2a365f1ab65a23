"""Who may connect: keys from a secret file, sockets that demand them, and the gate that admits their holders."""

from vllm_omni_plugin.curve.descriptors import cut_connection
from vllm_omni_plugin.curve.gate import NOTHING_SHOWN, Gate
from vllm_omni_plugin.curve.own_secret import new_secret, own_secret
from vllm_omni_plugin.curve.secrets import (
    CURVE_BYTES,
    HANDSHAKE_FRAME_BYTES,
    HANDSHAKE_MS,
    PLAIN_USERNAME,
    Secrets,
    require_key,
    require_password,
    secure_client,
    secure_server,
    why_refused,
)

__all__ = [
    "CURVE_BYTES",
    "HANDSHAKE_FRAME_BYTES",
    "HANDSHAKE_MS",
    "NOTHING_SHOWN",
    "PLAIN_USERNAME",
    "Gate",
    "Secrets",
    "cut_connection",
    "new_secret",
    "own_secret",
    "require_key",
    "require_password",
    "secure_client",
    "secure_server",
    "why_refused",
]
