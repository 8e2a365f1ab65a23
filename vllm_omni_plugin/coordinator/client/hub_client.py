"""The list of replicas for third parties, who have no session: the last one that the coordinator published."""

import threading
from collections.abc import Callable

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink, tell
from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaList, decode_replica_list
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_sub
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


class OmniCoordClientForHub:
    """Follows the replica list. The last one stands while the coordinator is away. All methods are thread-safe.

    Args:
        coord_zmq_addr: The coordinator's PUB address.
        on_update: Called in the client's own thread with each new list; must not block.
        secrets: The fleet's, or None where it has none.

    Raises:
        ConfigError: ``coord_zmq_addr`` is no address. That nobody listens there yet is no error.
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
        self._link = CoordinatorLink(coord_zmq_addr, open_sub, secrets, _log_trouble)
        self._thread = threading.Thread(target=self._follow, name="omni-hub-client", daemon=True)
        self._thread.start()

    @property
    def invalid_frames(self) -> int:
        """How many frames were dropped because they were no list."""
        return self._link.invalid_frames

    def get_replica_list(self) -> ReplicaList:
        """Return the last list received; before the first an empty one with timestamp 0.0."""
        return self._latest

    def get_replicas_for_stage(self, stage_id: int) -> ReplicaList:
        """Return the last list received, reduced to one stage."""
        latest = self.get_replica_list()
        return ReplicaList(
            replicas=[replica for replica in latest.replicas if replica.stage_id == stage_id],
            timestamp=latest.timestamp,
            no_new_work=[replica for replica in latest.no_new_work if replica.stage_id == stage_id],
        )

    def close(self) -> None:
        """Stop following and give everything back. Raises RuntimeError when called again."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the hub client is closed already")
            self._closed = True
            self._link.wake()
        self._thread.join()
        self._link.close(at_once=True)

    def _follow(self) -> None:
        while not self._closed:
            self._link.wait(None, zmq.POLLIN)
            self._take_frames()

    def _take_frames(self) -> None:
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
                self._link.note_invalid(error)
            else:
                tell(self._on_update, self._latest)


def _log_trouble(trouble: str) -> None:
    if trouble:
        logger.warning("No replica list for now: %s; the last one stands", trouble)
    else:
        logger.info("Following the replica list")
