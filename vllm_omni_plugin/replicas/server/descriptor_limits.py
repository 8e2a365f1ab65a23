"""How many files a process with replicas may open, and how many ZMQ sockets one that serves them to others."""

import errno
import resource
import sys

import zmq

from vllm_omni_plugin.curve.descriptors import NO_DESCRIPTORS_LEFT
from vllm_omni_plugin.errors import ConfigError, OmniError

_OPEN_FILES = 65535
"""What vLLM sets for its API servers."""
_BESIDE_REPLICAS = 64
_BY_REPLICA = 130
_BY_HEAD = 20
_BY_OWN_REPLICA = 16
"""Of a head that keeps it to itself; 10 were counted, and 30 beside them."""


def raise_limits(replicas: int, heads: int = 1, more: int = 0) -> None:
    """Allow as many files and sockets as replicas need. Before the first socket of ZMQ's shared context is made.

    Args:
        replicas: how many this process will serve.
        heads: how many will share each of them, as far as is known.
        more: descriptors that each takes besides.

    Raises:
        ConfigError: they need more than the system allows. ZMQ ends a process that has no descriptor left, at any time.
    """
    needed = check_limits(replicas, heads, more)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_OPEN_FILES, needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    raise_socket_limit(zmq.Context.instance())


def check_limits(replicas: int, heads: int = 1, more: int = 0) -> int:
    """How many open files replicas need; arguments and errors as of `raise_limits`. Changes nothing."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BESIDE_REPLICAS + replicas * (_BY_REPLICA + heads * _BY_HEAD + more)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{replicas} replicas need some {needed} open files, and this process may have {hard}: raise its limit "
            "(ulimit -Hn, or LimitNOFILE= of systemd), or run fewer replicas in it"
        )
    return needed


def files_beside_own(replicas: int) -> int:
    """How many files a head with one API server may open beside what so many replicas of its own need.

    Raises:
        ConfigError: they need more than it may open.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    # vLLM raises it by itself to this number, and not at all where the hard limit is lower.
    allowed = max(soft, _OPEN_FILES) if hard >= _OPEN_FILES else soft
    needed = _BESIDE_REPLICAS + replicas * _BY_OWN_REPLICA
    if needed > allowed:
        raise ConfigError(
            f"{replicas} replicas need some {needed} open files, and this process may have {allowed}: raise its soft "
            "limit (ulimit -n, or LimitNOFILE= of systemd), or run fewer replicas in it"
        )
    return allowed - needed


def worded(error: Exception) -> Exception:
    """The same error, or in its place one that says what to do where no descriptor was left."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return OmniError(f"{error}: {NO_DESCRIPTORS_LEFT}")
    return error


def raise_socket_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Allow as many sockets as ZMQ can. Only before the first one is made.

    ZMQ's default is 1,023, and a replica that is served has some 37 in the shared context.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
