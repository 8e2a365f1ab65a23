"""How many files and ZMQ sockets a process may open that serves its replicas to other processes."""

import resource

import zmq

_OPEN_FILES = 65535
"""What vLLM sets for its API servers. A replica needs over 100 and each of its heads some 20, while
many shells allow 1,024."""


def raise_limits() -> None:
    """Allow as many files and sockets as replicas need. Before the first socket of ZMQ's shared context is made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    raise_socket_limit(zmq.Context.instance())


def raise_socket_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Allow as many sockets as ZMQ can. Only before the first one is made.

    ZMQ's default is 1,023, and a replica that is served has some 37 in the shared context.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
