"""Symbols of vLLM that the ranks of a replica are started with."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_PARALLEL_CONFIG = "vllm.config.parallel.ParallelConfig"
_COORDINATOR = "vllm.v1.engine.coordinator.DPCoordinator"
_CONFIG = "vllm.config.vllm.VllmConfig"

GROUPS = (
    Symbol(f"{_COORDINATOR}", "starts and ends the waves of a group", ("parallel_config",), ("logging_config",)),
    Symbol(f"{_COORDINATOR}.proc", "ends with its group"),
    Symbol(f"{_COORDINATOR}._wait_for_zmq_addrs", "overridden: others may spawn meanwhile", ("zmq_addr_pipe",)),
    Symbol(f"{_COORDINATOR}.get_engine_socket_addresses", "told to every rank", ()),
    Symbol(f"{_COORDINATOR}.get_stats_publish_address", "told to every rank, and by it to front ends", ()),
    Symbol(
        "vllm.distributed.utils.create_tcp_store",
        "where ranks leave the port of their process group",
        ("host", "port"),
        ("listen_socket", "is_master", "world_size", "wait_for_workers"),
    ),
    Symbol("vllm.v1.engine.EngineCoreRequest.current_wave", "makes a rank that stands still start the next wave"),
    Symbol(f"{_PARALLEL_CONFIG}.data_parallel_size", "ranks of a replica"),
    Symbol(f"{_PARALLEL_CONFIG}.data_parallel_size_local", "ranks of one handshake"),
    Symbol(f"{_PARALLEL_CONFIG}.data_parallel_master_ip", "where ranks find each other"),
    Symbol(f"{_PARALLEL_CONFIG}._coord_store_port", "where ranks find each other"),
    Symbol(f"{_PARALLEL_CONFIG}.reconfigure_for_independent_dp_rank", "makes every rank a replica to a front end", ()),
    Symbol("vllm.config.model.ModelConfig.is_moe", "whether ranks compute in lockstep"),
    Symbol(f"{_CONFIG}.logging_config", "of a group's coordinator"),
    Symbol(f"{_CONFIG}.kv_transfer_config", "engines with the same name in transfers are given others"),
    Symbol("vllm.config.kv_transfer.KVTransferConfig.engine_id", "names an engine in transfers"),
)
"""What makes engines of ranks."""
