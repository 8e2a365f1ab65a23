"""Messages of the control connection of a replica server: with heads, and with the other machines of its replica.

UTF-8 JSON, one message per frame, as on the coordinator's wire. The head's socket is a DEALER, the server's a ROUTER.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.control_messages import OptionalReplicaId, decode_strictly
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState
from vllm_omni_plugin.replicas.kv_events.cache_log import MAX_PART, Cursor

PROTOCOL_VERSION = OLDEST_PROTOCOL_VERSION = 5
"""Version of these messages and of the data path, and the oldest one that is read, at least two back from the next
version on."""

CONTROL_ROLE = "replica"
"""Role for which the CURVE keys of control sockets are derived from the secret."""

MAX_CONTROL_BYTES = 256 * 1024
MAX_TEXT_CHARS = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Credential = Annotated[str, Meta(min_length=40, max_length=40)]
Fingerprint = Annotated[dict[Text, Text], Meta(max_length=64)]
MeetingId = Annotated[int, Meta(ge=0, lt=2**62)]
Keys = Annotated[bytes, Meta(max_length=8 * MAX_PART)]


class Attach(Struct, frozen=True, tag="attach"):
    """Head to server: requests a lease of this replica.

    If lost: it is sent again 0.1 to 5 s after the heartbeat timeout.

    Attributes:
        incarnation: the incarnation that the head has in its replica list. It may be older than the current one, but
            not older than the server's process.
        credential: authenticates the head on the data sockets, made for this lease only: the public half of a CURVE
            key pair (Z85) if links are encrypted, else a random string of the same length.
        replica_id: of the replica list. -1: an older head, or a list without ids.
        generation: of the head, as in its `Hello`. "": an older head.
    """

    protocol: int
    incarnation: Annotated[int, Meta(ge=0)]
    head_id: Text
    credential: Credential
    fingerprint: Fingerprint
    replica_id: OptionalReplicaId = -1
    generation: Text = ""


class RenewLease(Struct, frozen=True, tag="renew_lease"):
    """Head to server, every heartbeat interval: renews the lease. The server answers with `Status`.

    If lost: the next one serves.

    Attributes:
        busy: the head has a call open that may block the engine's main loop for long.
    """

    lease: int
    busy: bool = False


class Detach(Struct, frozen=True, tag="detach"):
    """Head to server: ends the lease. The server aborts the requests that are still running for this head.

    If lost: the lease times out.
    """

    lease: int


class DrainReplica(Struct, frozen=True, tag="drain_replica"):
    """Head to server, for an operator: drain the replica, stop its engine and do not restart it.

    If lost: each attached head sends one. Without any the engine runs on, unused.
    """

    lease: int


class StateTold(Struct, frozen=True, tag="state_told"):
    """Head to server, and server to the other heads: what the engine was told. The server keeps it.

    If lost: the next head tells the engine again.
    """

    lease: int
    told: ReplicaState


class PollCache(Struct, frozen=True, tag="poll_cache"):
    """Head to server: requests the changes of the engine's prefix cache after a cursor.

    If lost: it is repeated with each `RenewLease`, from the last cursor.

    The server answers with one `CacheChanges` as soon as there are changes. The head then sends the next poll. It sends
    the same poll again if the answer may be lost.
    """

    lease: int
    cursor: Cursor


class MachineReport(Struct, frozen=True, tag="machine_report"):
    """Another machine of a replica to the first one, at least every second and on every change: its whole state.

    If lost: the next one serves. The first machine answers with `MeetingPlan`.

    Attributes:
        rank: its `--node-rank`.
        process: tells the process from its predecessors.
        address: for operators.
        setup: what must be the same on all machines of a replica, as text.
        running: the meeting whose workers run here, or still end here. 0: none.
        failed: the last meeting whose workers ended by themselves, with the `reason`. 0: none.
        leaving: it was told to end, and stays until the replica has drained.
        ready: it can take part in a meeting: all its ranks of a lockstep group wait for one.
        drained: the meeting whose ranks here have finished their requests, and compute for those of others. 0: none.
    """

    rank: Annotated[int, Meta(ge=0)]
    process: MeetingId
    address: Text
    setup: Fingerprint
    running: MeetingId = 0
    failed: MeetingId = 0
    reason: Text = ""
    leaving: bool = False
    ready: bool = True
    drained: MeetingId = 0


class Attached(Struct, frozen=True, tag="attached"):
    """Server to head: grants a lease.

    If lost: as `Attach`; the unused lease times out.

    Attributes:
        input_addr: where the head connects a PUSH for requests: frames are (identity, request type, payload...).
        output_addr: where the head connects a PULL for its outputs. No other head receives them.
        client_index: must be in every request and utility call of this head.
        identity: ZMQ identity of the engine, the first frame of every message to it.
        max_message_bytes: limit of one message to the engine, all frames together.
        data_key: public CURVE key (Z85) of the data sockets, or "" if links are not encrypted.
        told: what heads have told this engine.
        incarnation: the current one. 0: an older server, which has that of `Attach`.
        machines: the addresses of all machines of a replica over several, the first one first.
    """

    lease: int
    input_addr: Text
    output_addr: Text
    client_index: int
    identity: bytes
    ready_response: bytes
    max_message_bytes: Annotated[int, Meta(ge=0)]
    data_key: Text
    fingerprint: Fingerprint
    told: ReplicaState = NOTHING_TOLD
    incarnation: Annotated[int, Meta(ge=0)] = 0
    machines: list[Text] = []


# The same in all versions, so that a head of another one can read the reason.
class AttachRefused(Struct, frozen=True, tag="refused"):
    """Server to head: refuses a lease.

    If lost: as `Attach`.

    Attributes:
        reason: for the logs of both ends; names each field that differs and both values.
        lasting: a retry will fail until the head or the server is restarted.
        other_generation: nothing is wrong: the replica is for heads with its configuration. Told without a secret, too:
            whoever names the right model and stage may attach then.
        machines: as in `Attached`, told with `other_generation`: the probes of all machines may ask any head.
    """

    reason: Text
    lasting: bool
    other_generation: bool = False
    machines: list[Text] = []


class Status(Struct, frozen=True, tag="status"):
    """Server to head: answers each `RenewLease`; also sent on every change.

    If lost: it answers the next `RenewLease`.

    Attributes:
        status: UP; DRAINING: send no new requests, and detach when all are finished; ERROR or DOWN: the engine is lost
            or hangs, and the lease has ended.
        engine_failed: whether the engine crashed by itself. False if it was ended from outside, hangs or drains.
        busy: whether any head has a call open that may block the engine's main loop for long.
    """

    lease: int
    status: ReplicaStatus
    reason: Text = ""
    engine_failed: bool = False
    busy: bool = False


class Expired(Struct, frozen=True, tag="expired"):
    """Server to head: this lease does not exist or has ended.

    If lost: it answers the next `RenewLease`.
    """

    lease: int


class CacheChanges(Struct, frozen=True, tag="cache_changes"):
    """Server to head: what changed in the engine's prefix cache. The fields after `cursor` are those of `CacheChange`.

    If lost: as `PollCache`.

    Attributes:
        since: cursor of the poll that this answers; `cursor` is for the next poll.
        stored: block keys, eight bytes each, little endian; as `removed`.
    """

    lease: int
    since: Cursor
    cursor: Cursor
    stored: Keys
    removed: Keys
    restart: bool
    complete: bool


class MeetingPlan(Struct, frozen=True, tag="meeting_plan"):
    """First machine of a replica to another one: answers each `MachineReport`; also sent on every change.

    If lost: it answers the next `MachineReport`.

    Attributes:
        meeting: whose workers are to run; those of any other are to end. 0: none.
        port: of torch's store on the first machine, used for this meeting only.
        number, incarnation: those of the engine, see `vllm_api.launch.engine_identity.set_identity`.
        refusal: why the process that gets this must end; "" if it need not.
        coordinator: of a lockstep group: the two addresses at which its ranks reach vLLM's coordinator.
        drain: a machine was told to end: the ranks of all finish their requests.
        leave: all have, and may end.
        reason: why the meeting before ended, if a machine was the cause.
    """

    meeting: MeetingId = 0
    port: Annotated[int, Meta(ge=0)] = 0
    number: int = 0
    incarnation: Annotated[int, Meta(ge=0)] = 0
    refusal: Text = ""
    coordinator: Annotated[list[Text], Meta(max_length=2)] = []
    drain: bool = False
    leave: bool = False
    reason: Text = ""


NO_MEETING = MeetingPlan()

OfHead = Attach | RenewLease | Detach | DrainReplica | StateTold | PollCache
ToServer = OfHead | MachineReport
FromServer = Attached | AttachRefused | Status | Expired | StateTold | CacheChanges | MeetingPlan

_encoder = msgspec.json.Encoder()
_to_server: msgspec.json.Decoder[ToServer] = msgspec.json.Decoder(ToServer)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def encode(message: ToServer | FromServer) -> bytes:
    return _encoder.encode(message)


def decode_to_server(frame: bytes) -> ToServer:
    return decode_strictly(_to_server, frame, "control message", MAX_CONTROL_BYTES)


def decode_from_server(frame: bytes) -> FromServer:
    return decode_strictly(_from_server, frame, "control message", MAX_CONTROL_BYTES)
