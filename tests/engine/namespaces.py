"""Network namespaces joined by a cable that a test can cut and mend."""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import pytest

_numbers = itertools.count()
HEAD_ADDRESS = "10.203.7.1"
NODE_ADDRESS = "10.203.7.2"
NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="making network namespaces takes root and iproute2"
)


class Cable:
    """Two namespaces, one for a head and one for a node, with a veth pair between them. A context manager.

    Attributes:
        head: name of the head's namespace.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self.head = f"omni-head-{os.getpid()}-{number}"
        self._node = f"omni-node-{os.getpid()}-{number}"

    def __enter__(self) -> Self:
        for namespace in (self.head, self._node):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", self.head, "type", "veth", "peer", "name", "cable", "netns", self._node)
        for namespace, address in ((self.head, HEAD_ADDRESS), (self._node, NODE_ADDRESS)):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (self.head, self._node):
            ip("netns", "del", namespace)

    @property
    def at_node(self) -> tuple[str, ...]:
        """Prefix of a command that runs at the node's end."""
        return at(self._node)

    def cut(self) -> None:
        """Nothing gets through from now on. TCP at the head's end is not told."""
        ip("-n", self._node, "link", "set", "cable", "down")

    def mend(self) -> None:
        """As it was at first."""
        ip("-n", self._node, "link", "set", "cable", "up")


def at(namespace: str) -> tuple[str, ...]:
    """Prefix of a command that runs there."""
    return ("ip", "netns", "exec", namespace)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread makes its sockets there in the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(f"/var/run/netns/{namespace}") as other:
        try:
            for_network = 0
            if libc.setns(other.fileno(), for_network) != 0:
                raise OSError(ctypes.get_errno(), f"entering {namespace}")
            yield
        finally:
            libc.setns(own.fileno(), for_network)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
