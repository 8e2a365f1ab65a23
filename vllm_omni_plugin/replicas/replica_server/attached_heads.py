"""The heads attached to one replica: admission, leases, and the cleanup after a lease has ended."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import zmq

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.control_messages import is_compatible
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState, is_later
from vllm_omni_plugin.errors import ConfigError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control import lease_messages as wire
from vllm_omni_plugin.replicas.control.cache_polling import CachePollServer
from vllm_omni_plugin.replicas.control.leases import Lease, Leases
from vllm_omni_plugin.replicas.links.replica_ports import Listener, close_all, listen_on_ports
from vllm_omni_plugin.replicas.replica_server.data_proxy import DataProxy
from vllm_omni_plugin.replicas.replica_server.served_engine import HEAD_SLOTS, ServedEngine
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings

logger = init_logger(__name__)

_MAX_LOGGED_REFUSALS = 1024
_NOTHING = "nothing"
_DIFFERS = "its version or configuration differs; without a secret only the log of the replica names the difference"
_SAME_IN_ALL_GENERATIONS = ("model", "stage", "stage name")


def differences(head: Mapping[str, str], replica: Mapping[str, str]) -> list[str]:
    """The fields in which two fingerprints differ, sorted, each with both values.

    A field that only one of them has is of a later version of this plugin, and is not compared.
    """
    return [
        f"{name}: head has {head.get(name, _NOTHING)}, replica {replica.get(name, _NOTHING)}"
        for name in sorted((head.keys() & replica.keys()).union(_SAME_IN_ALL_GENERATIONS))
        if head.get(name) != replica.get(name)
    ]


def is_other_generation(head: Mapping[str, str], replica: Mapping[str, str]) -> bool:
    """Whether two different fingerprints of a stage may be in one fleet, as before and after an upgrade.

    `Attach.generation` names what all stages of a head have.
    """
    return all(head.get(name) == replica.get(name) for name in _SAME_IN_ALL_GENERATIONS)


class AttachedHeads:
    """Handles the messages of the control connection and owns the leases. Lives on one event loop.

    It outlives the engine: after a restart the new engine is set with `admit`. `first_ports` (inputs, outputs) are
    announced, for slot 0, and stay bound. Other slots have ports only while they are leased. `on_drain` is called when
    a head requests a drain for its operator, `on_last_disconnect` when the last lease has ended, `on_attach` with the
    id by which an attached head knows the replica.
    """

    def __init__(
        self,
        settings: ServerSettings,
        first_ports: list[Listener],
        send: Callable[[bytes, wire.FromServer], None],
        *,
        name: Callable[[], str],
        incarnation: Callable[[], int],
        on_drain: Callable[[], None],
        on_last_disconnect: Callable[[], None],
        on_attach: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._ports: dict[int, list[Listener]] = {0: first_ports}
        self._send = send
        self._name = name
        self._incarnation = incarnation
        self._on_drain = on_drain
        self._on_last_disconnect = on_last_disconnect
        self._on_attach = on_attach
        self._clock = clock
        self._engine: ServedEngine | None = None
        self._status = ReplicaStatus.DOWN
        self._reason = "its engine is not ready"
        self._leases = Leases(HEAD_SLOTS, settings.heartbeat_timeout)
        self._cache_polls = CachePollServer(send)
        self._cleaning: set[asyncio.Task[None]] = set()
        self._resetting = False
        # What heads have told the engine.
        self._told = NOTHING_TOLD
        # That of all stages, of the heads that have leases.
        self._heads_generation = ""
        self._first_incarnation: int | None = None
        self._machines: Sequence[str] = ()
        self._last_lost: tuple[bytes, int] | None = None
        self._logged_refusals: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def admit(self, engine: ServedEngine, machines: Sequence[str] = ()) -> None:
        """Let heads attach to an engine: a new one, or one that hung and answers again. `machines` as in `Attached`."""
        self._machines = machines
        if self._first_incarnation is None:
            self._first_incarnation = self._incarnation()
        if engine is not self._engine:
            self._engine, self._told = engine, NOTHING_TOLD
            self._leases.free_all()
            self._cache_polls.set_log(engine.cache_log)
        self._status, self._reason = ReplicaStatus.UP, ""

    def notify(self, status: ReplicaStatus, reason: str, engine_failed: bool = False) -> None:
        """Send a status to all heads. Leases stay. New heads may attach only if the status is UP."""
        self._status, self._reason = status, reason[: wire.MAX_TEXT_CHARS]
        for lease in self._leases.current:
            self._send(lease.peer, wire.Status(lease.lease_id, status, self._reason, engine_failed))

    def detach_all(self, status: ReplicaStatus, reason: str, engine_failed: bool = False) -> None:
        """Send a status to all heads and end their leases. No head may attach until `admit`."""
        self.notify(status, reason, engine_failed)
        for lease in self._leases.current:
            self._end_lease(lease, reason)

    def release_engine(self) -> None:
        """Stop using an engine that is about to be closed. There must be no lease."""
        self._engine = None
        for task in self._cleaning:
            task.cancel()
        self._resetting = False

    async def expire_leases(self) -> None:
        """End leases that are not renewed, until cancelled; an error ends no more than this turn."""
        interval = self._settings.heartbeat_interval
        while True:
            due_at = self._clock() + interval
            await asyncio.sleep(interval)
            try:
                self._end_expired(due_at)
            except Exception:
                # If this task ended, lost heads would keep their leases for ever.
                logger.exception("Expired leases could not be ended; this is tried again.")

    def _end_expired(self, due_at: float) -> None:
        """End leases that were not renewed in time; if this process was late itself, that time is added."""
        now = self._clock()
        late_by = now - due_at
        for lease in self._leases.expired(now, late_by if late_by > self._settings.heartbeat_interval else 0.0):
            self._send(lease.peer, wire.Expired(lease.lease_id))
            self._end_lease(lease, f"it did not renew its lease for {self._settings.heartbeat_timeout:g} s")

    def handle(self, peer: bytes, message: wire.OfHead) -> None:
        """Attach a head, or do what one with a lease asks; messages of ended leases are told so."""
        if isinstance(message, wire.Attach):
            answer = self._attach(peer, message)
            if isinstance(answer, wire.AttachRefused):
                self._log_refusal(message.head_id, answer)
                if answer.lasting and self._settings.secrets is None:
                    # Any peer may send a request to an open port, and must not learn what runs here.
                    answer = wire.AttachRefused(_DIFFERS, True, answer.other_generation)
            self._send(peer, answer)
            return
        lease = self._leases.find(message.lease, peer)
        if lease is None:
            if isinstance(message, wire.DrainReplica) and (peer, message.lease) == self._last_lost:
                # The head sent this before it knew that its data connection, and so its lease, was lost.
                self._on_drain()
            elif not isinstance(message, wire.Detach):
                self._send(peer, wire.Expired(message.lease))
            return
        match message:
            case wire.RenewLease():
                self._leases.renew(lease, self._clock())
                assert self._engine is not None
                self._engine.slots[lease.slot].is_busy = message.busy
                self._send(peer, wire.Status(lease.lease_id, self._status, self._reason, busy=self._engine.is_busy))
            case wire.PollCache():
                self._cache_polls.poll(lease, message.cursor)
            case wire.StateTold():
                self._engine_told(lease, message.told)
            case wire.Detach():
                self._end_lease(lease, "it detached")
            case wire.DrainReplica():
                logger.info("Head %s asks replica %s to drain.", lease.head_id, self._name())
                self._on_drain()

    def _attach(self, peer: bytes, message: wire.Attach) -> wire.Attached | wire.AttachRefused:
        """Lease to a head, or refuse. An engine whose socket files are gone is replaced if no head uses it."""
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        for former in self._leases.superseded(peer, message.head_id):
            self._end_lease(former, "it attached again")
        if self._engine is None or self._resetting:
            return wire.AttachRefused("the engine is still aborting requests of a former head", lasting=False)
        lease = self._leases.grant(peer, message.head_id, self._clock())
        if lease is None:
            return wire.AttachRefused(f"all {HEAD_SLOTS} heads it can serve are attached", lasting=False)
        try:
            attached = self._lease_slot(self._engine, lease, message.credential)
        except (ConfigError, OSError, zmq.ZMQError) as error:
            self._leases.end(lease)
            self._leases.free(lease.slot)
            self._close_ports(lease.slot)
            if isinstance(error, FileNotFoundError) and not self._leases:
                self._engine.mark_lost(f"its sockets were removed: {error}")
            return wire.AttachRefused(str(error), lasting=False)
        if message.generation or len(self._leases) == 1:
            self._heads_generation = message.generation
        self._on_attach(message.replica_id)
        return attached

    def _refusal(self, message: wire.Attach) -> wire.AttachRefused | None:
        """Why a head may not attach: version, model, another generation's heads, not serving, or an outdated row."""
        if not is_compatible(message.protocol, wire.PROTOCOL_VERSION, wire.OLDEST_PROTOCOL_VERSION):
            return wire.AttachRefused(
                f"protocol: head has {message.protocol}, replica {wire.PROTOCOL_VERSION}", lasting=True
            )
        own = self._settings.fingerprint
        if differing := differences(message.fingerprint, own):
            reason = "; ".join(differing)[: wire.MAX_TEXT_CHARS]
            other = is_other_generation(message.fingerprint, own)
            return wire.AttachRefused(reason, True, other, list(self._machines) if other else [])
        if self._leases and self._heads_generation and message.generation not in ("", self._heads_generation):
            # What operators decide reaches the heads of one generation, and must not reach engines of another one.
            return wire.AttachRefused(
                "heads whose pipeline differs in another stage use it: give each of the two pipelines its own replicas "
                "of every stage",
                lasting=False,
            )
        if self._status is not ReplicaStatus.UP:
            return wire.AttachRefused(f"it is {self._status}: {self._reason}", lasting=False)
        # A head may not have got a newer row, for the coordinator may be away. A row from before the start of this
        # process is of another replica, which had this port.
        assert self._first_incarnation is not None
        if not self._first_incarnation <= message.incarnation <= self._incarnation():
            return wire.AttachRefused(
                f"incarnation: head has {message.incarnation}, replica {self._incarnation()}", lasting=False
            )
        return None

    def _lease_slot(self, engine: ServedEngine, lease: Lease, credential: str) -> wire.Attached:
        if lease.slot not in self._ports:
            self._ports[lease.slot] = listen_on_ports(self._settings.host, self._settings.ports, 2)
        ports = self._ports[lease.slot]
        new_proxy = partial(DataProxy, ports, credential, self._settings, partial(self._connection_lost, lease))
        proxy = engine.slots[lease.slot].lease(new_proxy)
        logger.info("Head %s is attached to replica %s.", lease.head_id, self._name())
        return wire.Attached(
            lease=lease.lease_id,
            input_addr=ports[0].address,
            output_addr=ports[1].address,
            client_index=lease.slot,
            identity=engine.identity,
            ready_response=engine.ready_response,
            max_message_bytes=self._settings.max_message_bytes,
            data_key=proxy.data_key,
            fingerprint={} if self._settings.secrets is None else dict(self._settings.fingerprint),
            told=self._told,
            incarnation=self._incarnation(),
            machines=list(self._machines),
        )

    def _engine_told(self, lease: Lease, told: ReplicaState) -> None:
        if is_later(told, self._told):
            self._told = told
            for other in self._leases.current:
                if other is not lease:
                    self._send(other.peer, wire.StateTold(other.lease_id, told))

    def _connection_lost(self, lease: Lease) -> None:
        """A broken data connection ends the head's lease; its drain may still come."""
        if self._leases.find(lease.lease_id, lease.peer) is not None:
            reason = (
                "its data connection ended: it has left or was cut off, did not read for too long, or got an output "
                "above its --omni-max-message-size"
            )
            self._send(lease.peer, wire.Status(lease.lease_id, ReplicaStatus.ERROR, reason))
            self._end_lease(lease, reason)
            self._last_lost = (lease.peer, lease.lease_id)

    def _end_lease(self, lease: Lease, reason: str) -> None:
        """End a lease: abort its requests, free its slot; after the last one the engine is reset."""
        if not self._leases.end(lease):
            return
        self._cache_polls.remove(lease)
        engine = self._engine
        assert engine is not None
        logger.info("Head %s is no longer attached to replica %s: %s.", lease.head_id, self._name(), reason)
        try:
            engine.slots[lease.slot].release()
            self._close_ports(lease.slot)
        except Exception as error:
            # All other leases end with the engine. A new engine has all its outputs free.
            engine.mark_lost(f"the output slot of head {lease.head_id} could not be released: {error}")
            return
        cleaning = self._run_cleanup(self._free_when_clean(engine, lease.slot))
        if not self._leases:
            # The engine stays as it was told, but a later head's fleet does not know the version.
            self._resetting, self._told = True, ReplicaState(state=self._told.state)
            self._run_cleanup(self._reset(engine, [*self._cleaning, cleaning]))
            self._on_last_disconnect()

    def _close_ports(self, slot: int) -> None:
        if slot:
            close_all(self._ports.pop(slot, ()))

    async def _free_when_clean(self, engine: ServedEngine, slot: int) -> None:
        """Free a slot once the engine has nothing for it; an engine that cannot say so is replaced."""
        output = engine.slots[slot]
        try:
            await output.wait_until_clean()
        except ReplicaError as error:
            engine.mark_lost(f"an output slot could not be cleaned: {error}")
        else:
            output.ended.add_done_callback(lambda _: self._free(engine, slot))

    def _free(self, engine: ServedEngine, slot: int) -> None:
        # All slots of a later engine are free from its start.
        if engine is self._engine:
            self._leases.free(slot)

    async def _reset(self, engine: ServedEngine, cleaning: list["asyncio.Task[None]"]) -> None:
        """Clear what the last heads have left; an engine that cannot be reset is replaced."""
        await asyncio.wait(cleaning)
        try:
            await engine.client.reset()
        except ReplicaError as error:
            engine.mark_lost(f"it could not be reset after its last head detached: {error}")
        else:
            self._resetting = False

    def _run_cleanup(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    def _log_refusal(self, head_id: str, refusal: wire.AttachRefused) -> None:
        """Log each reason once a head, those that last as warnings."""
        refused = (head_id, refusal.reason)
        if refused not in self._logged_refusals and len(self._logged_refusals) < _MAX_LOGGED_REFUSALS:
            self._logged_refusals.add(refused)
            if refusal.other_generation:
                logger.info(
                    "Head %s is of another generation than replica %s: %s.", head_id, self._name(), refusal.reason
                )
                return
            log = logger.warning if refusal.lasting else logger.info
            log("Head %s may not attach to replica %s: %s.", head_id, self._name(), refusal.reason)
