"""Explains in an error message why an address cannot be reached."""

import asyncio
import errno
import os
import socket

_TRIAL_S = 1.0
_LAST_PORT = 65535


async def why_unreachable(address: str) -> str:
    """Try to connect to `tcp://host:port`; returns a clause with our source address and the result."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        return "is not a tcp address"
    try:
        async with asyncio.timeout(_TRIAL_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        why = os.strerror(errno.ETIMEDOUT)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
    except UnicodeError as error:
        # Python looks up no name with an empty or too long part, and libzmq takes it.
        why = str(error)
    else:
        writer.close()
        return "accepts connections but does not answer like a replica"
    return f"this head cannot reach from {_source_address(host)}: {why}"


def _source_address(host: str) -> str:
    """The local address from which the system would reach a numeric address; for a name, our host name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, but makes the system choose a route.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
