"""The head's side of leases, with a record of its callbacks."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import zmq

from tests.fakes.conditions import repeated
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.replicas.remote.remote_replica import (
    AttachRefusedError,
    AttachSettings,
    RemoteReplica,
    attach_remote,
)


async def attach_when_it_may(attach: Callable[[], Awaitable[RemoteReplica]]) -> RemoteReplica:
    """Attach, again after every refusal that is not lasting."""

    async def attached() -> RemoteReplica | None:
        try:
            return await attach()
        except AttachRefusedError as error:
            if error.lasting:
                raise
            return None

    return await repeated(attached, "a lease")


class RemoteHead:
    """A head that attaches with `attach_remote`; close it after its replicas."""

    def __init__(self, codec: Any, fingerprint: Mapping[str, str], **settings: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outputs: list[Any] = []
        self.deaths: list[str] = []
        self.statuses: list[ReplicaStatus] = []
        self.settings = AttachSettings(
            context=self.context,
            codecs={0: codec},
            fingerprints={0: fingerprint},
            **({"head_id": f"head-{id(self)}", "heartbeat_interval": 0.05, "heartbeat_timeout": 10.0} | settings),
        )

    def set(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def close(self) -> None:
        self.context.term()

    async def attach(self, info: ReplicaInfo) -> RemoteReplica:
        replica = await attach_remote(info, 0, self.settings, self.outputs.append, self.statuses.append)
        replica.on_lost = self.deaths.append
        return replica

    @asynccontextmanager
    async def attached(self, info: ReplicaInfo) -> AsyncIterator[RemoteReplica]:
        replica = await attach_when_it_may(lambda: self.attach(info))
        try:
            yield replica
        finally:
            replica.close()
