"""The arguments of the simulation, without vLLM's parser."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.sim.sim_command import add_flags, settings_of


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


def vllm_config(**cache: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000, seed=3, get_vocab_size=lambda: 512),
        cache_config=SimpleNamespace(**({"block_size": 16, "enable_prefix_caching": True} | cache)),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
    )


def test_capacities_are_vllms_and_speeds_are_ours() -> None:
    settings = settings_of(vllm_config(), flags("--tokens-per-second", "50", "--prefill-tokens-per-second", "2000"))
    assert settings.step_s + settings.sequence_s == pytest.approx(0.02)
    assert settings.prefill_token_s == pytest.approx(0.0005)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_size) == (8, 256, 16)
    assert (settings.max_model_len, settings.vocabulary_size) == (1000, 512)


def test_engines_with_other_seeds_for_sampling_give_the_same_answers() -> None:
    assert settings_of(vllm_config(), flags()).seed == EngineSettings().seed


def test_the_kv_memory_holds_32_requests_of_maximum_length_by_default() -> None:
    assert settings_of(vllm_config(), flags()).kv_blocks == 32 * 63
    assert settings_of(vllm_config(), flags("--kv-blocks", "100")).kv_blocks == 100
    assert settings_of(vllm_config(block_size=128), flags()).kv_blocks == 32 * 8


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--replicas", "0"), "argument --replicas: 0 is below 1"),
        (("--replicas", "1.5"), "argument --replicas: '1.5' is not a whole number"),
        (("--tokens-per-second", "-3"), "argument --tokens-per-second: -3 is not above 0"),
        (("--prefill-tokens-per-second", "fast"), "argument --prefill-tokens-per-second: 'fast' is not a number"),
        (("--tokens-per-second", "nan"), "argument --tokens-per-second: nan is not above 0"),
        (("--kv-blocks", "-1"), "argument --kv-blocks: -1 is below 1"),
    ],
)
def test_invalid_numbers_are_refused(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        flags(*arguments)
    assert exit_info.value.code == 2
    assert complaint in capsys.readouterr().err
