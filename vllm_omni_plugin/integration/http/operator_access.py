"""Who may use the routes under `/omni`: the keys of a server, checked as vLLM checks its own."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm import envs

from vllm_omni_plugin.admin.access import Access, KeyCheck
from vllm_omni_plugin.admin.admin_keys import read_admin_keys
from vllm_omni_plugin.config import ADMIN_KEY_FLAG, OmniConfig
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


def has_one_of(keys: Sequence[str]) -> KeyCheck:
    """vLLM's check of a bearer token, in constant time. Its middleware does not check all paths."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    # The check does not use the application behind the middleware.
    has_key: KeyCheck = AuthenticationMiddleware(_no_app, list(keys)).verify_token
    return has_key


def has_api_key(args: Any) -> KeyCheck:
    """The check of the server's API keys: always true without any."""
    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return has_one_of(keys) if keys else lambda _: True


def make_access(
    args: Any, has_key: KeyCheck, local_key: Callable[[], str | None], *, unix_socket: bool = False
) -> Access:
    """Who may use the routes of operators. Where no file has keys, `local_key` makes one for this user's commands."""
    if args.omni_admin_key_file:
        keys = read_admin_keys(args.omni_admin_key_file, ADMIN_KEY_FLAG)
        return Access(has_key, has_one_of(keys), has_key_file=True)
    key = local_key()
    has_admin_key = has_one_of([key] if key else [])
    return Access(has_key, has_admin_key, unix_socket=unix_socket, loopback=bool(args.omni_admin_loopback))


def warn_of_open_access(options: OmniConfig) -> None:
    """Log what an operator may not expect: who may change the fleet, and a file of keys that others can read."""
    if options.admin_loopback:
        logger.warning(
            "With --omni-admin-loopback, everybody who has a loopback address of this machine may change the fleet "
            "(DELETE, drain, resume) and use explain: its other users, and who reaches a proxy or forwarder that runs "
            "on it."
        )
    elif options.admin_key_file is not None and os.stat(options.admin_key_file).st_mode & 0o077:
        logger.warning("%s %s: others may access it; run `chmod 600` on it.", ADMIN_KEY_FLAG, options.admin_key_file)


async def _no_app(*_: Any) -> None:
    raise NotImplementedError
