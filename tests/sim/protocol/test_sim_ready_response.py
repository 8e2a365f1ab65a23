"""vLLM's front end understands the ready responses of simulated engines."""

from types import SimpleNamespace

from vllm_omni_plugin.vllm_api.protocol.sim_protocol import ready_response
from vllm_omni_plugin.vllm_api.requests.ready import apply_ready_responses


def test_a_front_end_applies_the_ready_response_to_its_configuration() -> None:
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000, dtype="torch.bfloat16"),
        parallel_config=SimpleNamespace(
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        lora_config=SimpleNamespace(max_loras=2),
        instance_id="fleet",
    )
    head = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2000),
        cache_config=SimpleNamespace(num_gpu_blocks=None, block_size=0),
        parallel_config=SimpleNamespace(_coord_store_port=0),
    )
    apply_ready_responses(head, [ready_response(engine, index, 100, 16) for index in (0, 1)])
    assert head.model_config.max_model_len == 1000
    assert (head.cache_config.num_gpu_blocks, head.cache_config.block_size) == (200, 16)
    assert head.cache_config.kv_cache_size_tokens == 1600
