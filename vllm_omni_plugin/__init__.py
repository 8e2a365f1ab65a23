"""vLLM as a fleet: one OpenAI server, a pool of engine replicas, every request balanced by live load.

Words of code, metrics and JSON:
    run, attempt: what one stage does for a request; one assignment of it to a replica.
    assigned, charged: a replica is chosen for a run, and its load counts the run until it is released.
    sent, dispatched: given to the engine's socket; assigned and sent.
    running: begun by the engine, as far as it has reported.
    in flight: charged and not released, of this head; `total_in_flight` and `queue_length` are of all heads. A tenant's
        also count what waits.
    waiting: no replica has it, for a `WaitReason`. Held: until one serves (`requests_held` also counts moving and
        paused runs). Queued: for room.
    finished, ended: no output follows; and it is released, and waits nowhere.
    over its share, headroom: a tenant used more than its weight gives; capacity that others find free.
    cordoned: attached, and gets no new requests, for one or several reasons.
    late, hung, stalled, lost: its server answers late; its engine does not answer; answers and computes nothing; its
        requests move: restart, resume or replay on another replica.
    suspect: a request whose engine crashed. One that crashed two is a query of death.
    peer, other head: the other end of a connection; another head.
    lease, session: a head's right to use a replica; its connection to the coordinator.
    generation: heads and replicas that are equal in all that is compared; an upgrade makes another one with the same
        model and stages. `is_other_generation` compares one stage, `Attach.generation` names what all stages have.
    incarnation, host slot, number: one start of an engine; its place on its machine; what it keeps over restarts.
"""
