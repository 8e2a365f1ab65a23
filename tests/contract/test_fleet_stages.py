"""Which stages are asked what, and in whose tokens answers come."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages, StagePlan
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Stage


def stage(
    stage_id: int, model: str | None, *inputs: str, output: Modality = Modality.TEXT, final: bool = False
) -> Stage:
    """Return a stage, Python's if it has no model."""
    engine = VLLM_ENGINE if model else "package.module:Class"
    name = f"stage{stage_id}"
    transform = "package.module:function" if len(inputs) > 1 else None
    return Stage(stage_id, name, engine, output, model, inputs=inputs, transform=transform, final=final)


def plan(stage_id: int, stage: Stage | None, tokenizer: str = "t", config: Any = None) -> StagePlan:
    return StagePlan(
        stage_id=stage_id,
        stage=stage,
        replicas=1,
        policy="prefix",
        policy_config=None,
        make_launcher=lambda *_: None,  # type: ignore[arg-type, return-value]
        api=SimpleNamespace(tokenizer=tokenizer),  # type: ignore[arg-type]
        fingerprint={"tokenizer": tokenizer, "tokenizer mode": "auto"} if stage is None or stage.is_vllm else {},
        vllm_config=config,
        lockstep=False,
    )


def plans(*stages: Stage, tokenizers: str = "") -> tuple[StagePlan, ...]:
    tokenizers = tokenizers or "t" * len(stages)
    return tuple(plan(index, stage, tokenizers[index]) for index, stage in enumerate(stages))


def test_a_fleet_without_pipeline_has_one_stage() -> None:
    stages = FleetStages.of([plan(0, None, config="config")])
    assert (stages.pipeline, stages.prompt_stage, stages.model_stages) == (None, 0, (0,))
    assert (stages.configs, stages.answer_tokenizer, stages.adapter_stages) == (["config"], None, (0,))


def test_prefill_and_decode_stages_both_belong_to_the_model() -> None:
    prefill = stage(0, "m", output=Modality.KV_CACHE)
    stages = FleetStages.of(plans(prefill, stage(1, "m", "stage0", final=True)))
    assert (stages.prompt_stage, stages.model_stages, stages.adapter_stages) == (1, (0, 1), (0, 1))


def test_an_adapter_applies_in_the_stages_that_read_the_prompt() -> None:
    stages = FleetStages.of(plans(stage(0, "m"), stage(1, "m", "stage0", final=True), stage(2, "m", final=True)))
    assert (stages.model_stages, stages.adapter_stages) == ((0, 1, 2), (0, 2))


def test_the_model_is_that_of_the_stage_which_reads_prompts() -> None:
    first = stage(0, None, output=Modality.LATENT)
    stages = FleetStages.of(plans(first, stage(1, "m"), stage(2, "n", "stage0", "stage1", final=True)))
    assert (stages.prompt_stage, stages.model_stages) == (1, (1,))


@pytest.mark.parametrize(
    ("second", "tokenizers", "expected"),
    [
        (stage(1, "n", "stage0", final=True), "tu", "u"),
        (stage(1, "n", "stage0", final=True), "tt", None),
        (stage(1, None, "stage0", final=True), "tu", None),
    ],
    ids=["another tokenizer", "the same tokenizer", "a Python stage"],
)
def test_answers_come_in_the_tokens_of_the_stage_in_front(second: Stage, tokenizers: str, expected: str | None) -> None:
    stages = FleetStages.of(plans(stage(0, "m"), second, tokenizers=tokenizers))
    assert (stages.answer_tokenizer and stages.answer_tokenizer()) == expected
