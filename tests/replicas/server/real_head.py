"""The head's own side of a lease, and what it hears."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq

from tests.replicas.remote_server import TimedOutputs
from tests.replicas.server.engines import SlotCodec
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.client.remote import (
    AttachRefusedError,
    AttachSettings,
    RemoteReplica,
    attach_remote,
)
from vllm_omni_plugin.replicas.links.link import Frames


class TimedSlotCodec(SlotCodec):
    """A `SlotCodec` whose outputs have times."""

    def decode_outputs(self, frames: Frames) -> Any:
        return msgspec.json.decode(frames[0], type=TimedOutputs)


class RealHead:
    """A head and what it hears."""

    def __init__(self, fingerprint: dict[str, str], secrets: Secrets | None, **settings: Any) -> None:
        self.tokens: list[str] = []
        self.deaths: list[str] = []
        self.statuses: list[ReplicaStatus] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._settings = AttachSettings(
            context=self._context,
            codecs={0: TimedSlotCodec()},
            head_id=f"head-{id(self)}",
            fingerprints={0: fingerprint},
            heartbeat_interval=0.05,
            heartbeat_timeout=10.0,
            secrets=secrets,
            clock=time.monotonic,
            **settings,
        )

    @asynccontextmanager
    async def attached(self, info: ReplicaInfo) -> AsyncIterator[RemoteReplica]:
        replica = await self._attach(info)
        try:
            yield replica
        finally:
            replica.close()

    def close(self) -> None:
        self._context.term()

    async def _attach(self, info: ReplicaInfo) -> RemoteReplica:
        """Attach, trying again while the server says that this may help."""
        async with asyncio.timeout(10):
            while True:
                try:
                    replica = await attach_remote(info, 0, self._settings, self._note, self.statuses.append)
                    replica.on_lost = self.deaths.append
                    return replica
                except AttachRefusedError as error:
                    if error.lasting:
                        raise
                    await asyncio.sleep(0.002)

    def _note(self, outputs: Any) -> None:
        self.tokens += [output.request_id for output in outputs.outputs]
