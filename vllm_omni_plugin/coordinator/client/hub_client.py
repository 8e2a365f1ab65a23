"""The client of a subscriber, which reads the published replica lists and needs no session."""

import threading
from collections.abc import Callable

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, notify
from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaList, decode_replica_list
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_sub
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


class OmniCoordClientForHub:
    """Keeps the last published replica list, also while the coordinator is away. All methods are thread-safe.

    ``coord_zmq_addr`` is the coordinator's PUB address; `ConfigError` if it is none. ``on_update`` is called in the
    client's thread with each new list and must not block.
    """

    def __init__(
        self,
        coord_zmq_addr: str,
        on_update: Callable[[ReplicaList], None] | None = None,
        *,
        secrets: Secrets | None = None,
    ) -> None:
        self._on_update = on_update
        self._latest = ReplicaList(replicas=[], timestamp=0.0)
        self._lock = threading.Lock()
        self._closed = False
        self._link = CoordinatorLink(coord_zmq_addr, open_sub, secrets, _log_problem)
        self._thread = threading.Thread(target=self._run, name="omni-hub-client", daemon=True)
        self._thread.start()

    @property
    def invalid_frames(self) -> int:
        return self._link.invalid_frames

    def get_replica_list(self) -> ReplicaList:
        """Return the last list; before the first one an empty list with timestamp 0.0."""
        return self._latest

    def get_replicas_for_stage(self, stage_id: int) -> ReplicaList:
        latest = self.get_replica_list()
        return ReplicaList(
            replicas=[replica for replica in latest.replicas if replica.stage_id == stage_id],
            timestamp=latest.timestamp,
            no_new_work=[replica for replica in latest.no_new_work if replica.stage_id == stage_id],
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the hub client is closed already")
            self._closed = True
            self._link.wake()
        self._thread.join()
        self._link.close(at_once=True)

    def _run(self) -> None:
        while not self._closed:
            self._link.wait(None, zmq.POLLIN)
            self._receive_frames()

    def _receive_frames(self) -> None:
        while not self._closed:
            try:
                parts = self._link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 1:
                    raise WireError(f"replica list: {len(parts)} frames instead of one")
                self._latest = decode_replica_list(parts[0])
            except WireError as error:
                self._link.record_invalid(error)
            else:
                notify(self._on_update, self._latest)


def _log_problem(problem: str) -> None:
    if problem:
        logger.warning("No new replica list: %s. The last one stays in use.", problem)
    else:
        logger.info("The coordinator sends its replica list.")
