"""Makes an engine differ from all others of the fleet, and from its predecessors, in what vLLM derives from its index.

Under vLLM's data parallelism this is `data_parallel_index`. The table in docs/data_parallel.md says what depends on it.
"""

import os
import socket
import uuid
from typing import Any

import numpy
from vllm import envs
from vllm.config import ParallelConfig

from vllm_omni_plugin.errors import ReplicaError


def set_identity(config: Any, number: int, incarnation: int) -> None:
    """Give `config`, which must belong to one engine alone, the identity of that engine.

    `number` is unique in the fleet, and the same in all restarts; `incarnation` differs. With 0 the seed is vLLM's.
    """
    # Each node balances its own engines, so that connectors look for their siblings on this node (Mooncake's bootstrap
    # server), not at the first index of the fleet.
    config.parallel_config.data_parallel_hybrid_lb = True
    if config.model_config.is_moe:
        config.parallel_config.__class__ = _WithIndex
        config.parallel_config.fleet_number = number
    if incarnation:
        # As a spawn key, because vLLM mixes (seed, index): the successor of one replica would be like another replica.
        sequence = numpy.random.SeedSequence(config.model_config.seed, spawn_key=(incarnation,))
        config.model_config.seed = int(sequence.generate_state(1)[0])
    # The first engine of a head that was restarted is another one, too, if the user has given an id.
    name = f"replica{number}_{incarnation or uuid.uuid4().hex}"
    # In names of shared memory, which a killed engine leaves.
    config.instance_id = f"{config.instance_id}_{name}"
    for transfers in (config.kv_transfer_config, config.ec_transfer_config):
        if transfers is not None:
            transfers.engine_id = f"{transfers.engine_id}_{name}"
    profiler = config.profiler_config
    # Names of files have the rank of the worker in its own group only. The profiler creates the folder.
    for kind in ("torch_profiler_dir", "proton_profiler_dir"):
        if folder := getattr(profiler, kind):
            setattr(profiler, kind, f"{folder}/replica{number}")


def listen_for_transfers_at(address: str) -> None:
    """Make the engines that this process starts announce and bind this address for NIXL, unless the user gave one.

    vLLM's default is localhost, where engines on other machines would look for them on their own.
    """
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", address)


def require_free_ports(config: Any, number: int) -> None:
    """Raise ReplicaError if the port on which an engine with NIXL will listen is taken: vLLM would wait for ever."""
    transfers = config.kv_transfer_config
    # The second one names the connectors behind a MultiConnector.
    if transfers is None or "nixl" not in f"{transfers.kv_connector} {transfers.kv_connector_extra_config}".lower():
        return
    host, port = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT + number
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise ReplicaError(
            f"its engine cannot listen for NIXL on {host} port {port}, VLLM_NIXL_SIDE_CHANNEL_PORT + the replica's "
            f"number {number} ({error}): give each fleet on this machine its own VLLM_NIXL_SIDE_CHANNEL_PORT, and as "
            "VLLM_NIXL_SIDE_CHANNEL_HOST only an address of this machine"
        ) from error


class _WithIndex(ParallelConfig):  # type: ignore[misc]
    """Sets the index of an engine with experts, after vLLM has set it to the rank in a lockstep group.

    vLLM takes an engine with experts and an index above 0 for a rank of a group, so it cannot be started with another
    index. It calls one of these methods in the engine's process, before anything reads the index.
    """

    fleet_number: int

    def reconfigure_for_independent_dp_rank(self) -> None:
        super().reconfigure_for_independent_dp_rank()
        self._set_index()

    def stateless_init_dp_group(self, return_store: bool = False) -> Any:
        group = super().stateless_init_dp_group(return_store)
        self._set_index()
        return group

    def _set_index(self) -> None:
        self.data_parallel_index = self.fleet_number
        # Workers on other machines need not know this class.
        self.__class__ = ParallelConfig
        del self.fleet_number
