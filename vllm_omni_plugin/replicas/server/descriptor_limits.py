"""How many files and ZMQ sockets a process may open that serves its replicas to other processes."""

import errno
import resource

import zmq

from vllm_omni_plugin.curve.descriptors import NONE_LEFT
from vllm_omni_plugin.errors import ConfigError, OmniError

_OPEN_FILES = 65535
"""What vLLM sets for its API servers."""
_BESIDE_REPLICAS = 64
_BY_REPLICA = 130
_BY_HEAD = 20


def raise_limits(replicas: int, heads: int = 1, more: int = 0) -> None:
    """Allow as many files and sockets as replicas need. Before the first socket of ZMQ's shared context is made.

    Args:
        replicas: how many this process will serve.
        heads: how many will share each of them, as far as is known.
        more: descriptors that each takes besides.

    Raises:
        ConfigError: they need more than the system allows. ZMQ ends a process that has no descriptor left, at any time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BESIDE_REPLICAS + replicas * (_BY_REPLICA + heads * _BY_HEAD + more)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{replicas} replicas need some {needed} open files, and this process may have {hard}: raise its limit "
            "(ulimit -Hn, or LimitNOFILE= of systemd), or run fewer replicas in it"
        )
    wanted = max(_OPEN_FILES, needed)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    raise_socket_limit(zmq.Context.instance())


def worded(error: Exception) -> Exception:
    """The same error, or in its place one that says what to do where no descriptor was left."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return OmniError(f"{error}: {NONE_LEFT}")
    return error


def raise_socket_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Allow as many sockets as ZMQ can. Only before the first one is made.

    ZMQ's default is 1,023, and a replica that is served has some 37 in the shared context.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
