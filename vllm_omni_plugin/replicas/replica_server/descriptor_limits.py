"""Limits of open files and ZMQ sockets of a process with replicas."""

import errno
import resource
import sys

import zmq

from vllm_omni_plugin.curve.zap_handler import NO_DESCRIPTORS_LEFT
from vllm_omni_plugin.errors import ConfigError, OmniError

_OPEN_FILES = 65535
"""The soft limit that vLLM sets for its API servers."""
_BASE_FILES = 64
_FILES_PER_REPLICA = 130
_FILES_PER_HEAD = 20
_FILES_PER_OWN_REPLICA = 16
"""Of a replica that no other head uses; 10 were measured, and 30 for the rest of the process."""


def raise_limits(replicas: int, heads: int = 1, more: int = 0) -> None:
    """Raise the limits of files and sockets for replicas. Call before ZMQ's shared context has its first socket.

    `heads`: expected heads of each replica; `more`: further descriptors of each replica. Raises `ConfigError` if they
    need more than the hard limit, since ZMQ aborts a process that has no descriptor left.
    """
    needed = check_limits(replicas, heads, more)
    soft, hard = _limits()
    wanted = min(max(_OPEN_FILES, needed), hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    raise_socket_limit(zmq.Context.instance())


def check_limits(replicas: int, heads: int = 1, more: int = 0) -> int:
    """How many open files replicas need. Arguments and errors as `raise_limits`, but changes nothing."""
    needed = _BASE_FILES + replicas * (_FILES_PER_REPLICA + heads * _FILES_PER_HEAD + more)
    _require(replicas, needed, _limits()[1], "limit (ulimit -Hn")
    return needed


def files_beside_own(replicas: int) -> int:
    """How many files are left for connections of a head with one API server and this many replicas.

    Raises `ConfigError` if the replicas need more than the limit.
    """
    soft, hard = _limits()
    # vLLM raises the soft limit to this number, unless the hard limit is lower.
    allowed = max(soft, _OPEN_FILES) if hard >= _OPEN_FILES else soft
    needed = _BASE_FILES + replicas * _FILES_PER_OWN_REPLICA
    _require(replicas, needed, allowed, "soft limit (ulimit -n")
    return allowed - needed


def _limits() -> list[int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits]


def _require(replicas: int, needed: int, allowed: int, limit: str) -> None:
    """Refuse more replicas than the limit of open files allows."""
    if needed > allowed:
        raise ConfigError(
            f"{replicas} replicas need some {needed} open files, and this process may have {allowed}: raise its "
            f"{limit}, or LimitNOFILE= of systemd), or run fewer replicas in it"
        )


def with_advice(error: Exception) -> Exception:
    """The same error, or one that says what to do if no descriptor was left."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return OmniError(f"{error}: {NO_DESCRIPTORS_LEFT}")
    return error


def raise_socket_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Allow the most sockets that ZMQ can have. Call before the first socket is made.

    ZMQ's default is 1,023; a replica of a node has about 37 in the shared context.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
