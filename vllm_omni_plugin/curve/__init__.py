"""Authentication and encryption of sockets: the secret file, CURVE keys, and the ZAP handler that checks them."""

from vllm_omni_plugin.curve.secrets import (
    CURVE_BYTES,
    HANDSHAKE_FRAME_BYTES,
    HANDSHAKE_MS,
    PLAIN_USERNAME,
    Secrets,
    new_secret,
    require_key,
    require_password,
    secure_client,
    secure_server,
    user_secret,
    why_refused,
)
from vllm_omni_plugin.curve.zap_handler import NO_CREDENTIAL, ZapHandler, cut_connection

__all__ = [
    "CURVE_BYTES",
    "HANDSHAKE_FRAME_BYTES",
    "HANDSHAKE_MS",
    "NO_CREDENTIAL",
    "PLAIN_USERNAME",
    "Secrets",
    "ZapHandler",
    "cut_connection",
    "new_secret",
    "require_key",
    "require_password",
    "secure_client",
    "secure_server",
    "user_secret",
    "why_refused",
]
