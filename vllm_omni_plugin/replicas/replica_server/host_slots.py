"""Places of replicas on their machine. A replica that is started again in the same place keeps its number."""

import hashlib
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity

MOST_SLOTS = 4096
SOCKET = "\0vllm-omni-replica"
"""Beginning of the sockets' names."""
_FIRST_OWN, _OWN_NUMBERS = 1024, 23_552
"""Numbers that nodes choose themselves: above those that heads give to small fleets. vLLM adds the number to its ports
(5600 for NIXL), and the sums stay below 32,768, from where the system takes ports for connections."""


class HostSlots:
    """The lowest slots of this machine that no other process of the fleet has, taken until `close`. A context manager.

    A slot is an abstract unix socket. Only one process of a network namespace can bind its name, whichever its user or
    its files are, and the name is free as soon as the process has ended, however it ended. Machines and pods with the
    same hostname differ in `address`. Nodes of other fleets, with other coordinators, do not shift the slots. `names`
    are unique in the fleet. Raises ConfigError if fewer than `count` are free.
    """

    def __init__(self, count: int, address: str, fleet: str) -> None:
        self._machine = f"{socket.gethostname()}/{address}"
        # The name of a socket has at most 107 bytes.
        self._fleet = hashlib.blake2b(fleet.encode(), digest_size=8).hexdigest()
        with ExitStack() as taken:
            self._slots = tuple(_take(count, f"{SOCKET}-{self._fleet}", taken))
            self._sockets = taken.pop_all()
        self.names = tuple(f"{self._machine}/{slot}" for slot in self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sockets.close()

    def identities(self, numbers: Sequence[int]) -> list[ReplicaIdentity]:
        """Identities of the replicas: with the numbers that the head gave them, or their own ones as far as it did not.

        Own numbers differ on this machine, and probably from those of other machines.
        """
        digest = hashlib.blake2b(f"{self._fleet}/{self._machine}".encode(), digest_size=8).digest()
        base = int.from_bytes(digest)
        own = [_FIRST_OWN + (base + slot) % _OWN_NUMBERS for slot in self._slots]
        given = [*numbers, *own[len(numbers) :]]
        return [ReplicaIdentity(number, name) for number, name in zip(given, self.names, strict=True)]


def _take(count: int, prefix: str, taken: ExitStack) -> list[int]:
    """Take the lowest free slots of this machine; refused if there are too few."""
    slots: list[int] = []
    for slot in range(MOST_SLOTS):
        if len(slots) == count:
            break
        place = taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            place.bind(f"{prefix}-{slot}")
            slots.append(slot)
        except OSError:
            place.close()
    else:
        if len(slots) < count:
            raise ConfigError(f"{count} replicas are too many: this machine can run {len(slots)} more")
    return slots
