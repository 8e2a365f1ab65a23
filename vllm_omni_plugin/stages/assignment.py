"""The message with which the process of a Python stage is started, before it uses sockets."""

from typing import Any

import msgspec


class Assignment(msgspec.Struct, frozen=True):
    """What the process of a stage needs to start.

    Attributes:
        engine: `package.module:Class`.
        device_index: which of the node's accelerators it takes, counted round.
        output_addrs: where answers go, by client index.
        memory_fd: descriptor of memory shared with the head, which then is the only client.
    """

    stage: str
    engine: str
    options: dict[str, Any]
    device_index: int
    replica_id: int
    identity: bytes
    import_path: list[str]
    input_addr: str = ""
    output_addrs: list[str] = []
    memory_fd: int | None = None
