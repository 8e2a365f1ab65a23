"""Files of pipelines: the contents of valid ones, and the error line of each invalid one."""

from pathlib import Path

import pytest

from vllm_omni_plugin.pipeline import Modality, Stage, load_pipeline

from .files import DIAMOND, PREFILL, SINGLE, SPEECH, chain, complaint, tail

STAGE_KEYS = (
    "id, name, engine, model, engine_args, options, inputs, transform, replicas, policy, policy_config, sampling, "
    "output, final, async_chunk, chunk_size, min_prompt_tokens"
)


def test_every_key_of_a_stage_is_read() -> None:
    thinker, talker, vocoder = load_pipeline(SPEECH).stages
    assert thinker == Stage(
        id=0,
        name="thinker",
        engine="vllm",
        model="example/thinker",
        engine_args={"max_model_len": 4096, "enforce_eager": True},
        replicas=2,
        output=Modality.TEXT,
        final=True,
    )
    assert talker == Stage(
        id=1,
        name="talker",
        engine="vllm",
        model="example/talker",
        engine_args={"max_model_len": 8192, "enforce_eager": True},
        inputs=("thinker",),
        transform="tokens",
        async_chunk=True,
        policy="least-tokens",
        policy_config={"decode_weight": 0.2},
        sampling={"temperature": 0.8, "max_tokens": 2048},
        output=Modality.TOKENS,
    )
    assert vocoder == Stage(
        id=2,
        name="vocoder",
        engine="example.vocoder:Vocoder",
        options={"sample_rate": 24000},
        inputs=("talker",),
        async_chunk=True,
        replicas=0,
        policy="round-robin",
        output=Modality.AUDIO,
        final=True,
    )


def test_names_of_engine_arguments_get_underscores_up_to_a_dot(file: Path) -> None:
    file.write_text(
        chain("engine_args: {a-b: 1, c_d: 2, e-f.g-h: 3}", "inputs: [writer]", "output: text", "final: true")
    )
    assert load_pipeline(file).stages[1].engine_args == {"a_b": 1, "c_d": 2, "e_f.g-h": 3}


def test_of_merged_mappings_the_first_wins_and_own_keys_win_over_all(file: Path) -> None:
    file.write_text(
        chain(
            "policy_config: &a {x: 1, y: 1, z: 1}",
            "options_of_nobody: &b {x: 2, w: 2}",
            "engine_args: {<<: [*a, *b], z: 3}",
            "inputs: [writer]",
            "output: text",
            "final: true",
        ).replace("options_of_nobody", "sampling")
    )
    assert load_pipeline(file).stages[1].engine_args == {"x": 1, "y": 1, "z": 3, "w": 2}


def test_whole_numbers_are_read_also_as_decimals(file: Path) -> None:
    file.write_text(
        "\ufeff"
        + PREFILL
        + "  - {id: 2, name: voice, engine: 'a.b:C', inputs: [decode], async_chunk: true, chunk_size: 4.0,\n"
        + "     output: audio, final: true}\n"
    )
    prefill, decode, voice = load_pipeline(file).stages
    assert (prefill.min_prompt_tokens, decode.chunk_size, repr(voice.chunk_size)) == (64, 16, "4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", '1: must be a mapping, not "a"'),
        ("{}", "1: needs 'stages'"),
        ("stages: []", "1: stages: must not be empty"),
        ("stages: {}", "1: stages: must be a list, not {}"),
        ("stages:\n- 1", "2: stages[0]: must be a mapping, not 1"),
        ("stages:\n- {id: 0}", "2: stages[0]: needs 'name' and 'engine' and 'output'"),
        (f"{SINGLE}stage: 1", "8: stage: unknown key (did you mean 'stages'?): use stages"),
        (
            SINGLE.replace("model", "modle"),
            f"5: stages[0].modle: unknown key (did you mean 'model'?): use {STAGE_KEYS}",
        ),
        (f'{SINGLE}    "a\\n b": 1', f"8: stages[0]['a\\n b']: unknown key: use {STAGE_KEYS}"),
        (SINGLE.replace("    model: example/writer\n", ""), "2: stages[0]: needs 'model'"),
        (SINGLE.replace("0", '"0"'), '2: stages[0].id: must be a whole number, not "0"'),
        (SINGLE.replace("0", "true"), "2: stages[0].id: must be a whole number, not true"),
        (SINGLE.replace("0", "-1"), "2: stages[0].id: must be at least 0, not -1"),
        (
            SINGLE.replace("name: writer", "name: a b"),
            '3: stages[0].name: must be an identifier of letters, digits and underscores, not "a b"',
        ),
        (
            SINGLE.replace("name: writer", 'name: "a\\n"'),
            '3: stages[0].name: must be an identifier of letters, digits and underscores, not "a\\n"',
        ),
        (SINGLE.replace("vllm", "vlm"), '4: stages[0].engine: must be vllm or package.module:Class, not "vlm"'),
        (SINGLE.replace("vllm", "a.b:C"), "5: stages[0].model: only for engine: vllm; a Python engine has 'options'"),
        (
            f"{SINGLE}    options: {{}}",
            "8: stages[0].options: only a Python engine has options; vLLM's has 'engine_args'",
        ),
        (SINGLE.replace("example/writer", '""'), "5: stages[0].model: must not be empty"),
        (
            SINGLE.replace("output: text", "output: txt"),
            "6: stages[0].output: must be one of text, tokens, audio, image, embedding, scores, latent, kv_cache, "
            "not \"txt\" (did you mean 'text'?)",
        ),
        (
            SINGLE.replace("final: true", f"final: {'x' * 100}"),
            f'7: stages[0].final: must be true or false, not "{"x" * 59}...',
        ),
        (
            f"{SINGLE}    engine_args:\n      --seed: 1",
            "9: stages[0].engine_args.--seed: must be a flag's name without '--' (the model has its own key), "
            'not "--seed"',
        ),
        (
            f"{SINGLE}    engine_args: {{model: m}}",
            "8: stages[0].engine_args.model: must be a flag's name without '--' (the model has its own key), "
            'not "model"',
        ),
        (
            f"{SINGLE}    engine_args:\n      max-model-len: 1\n      max_model_len: 2",
            "10: stages[0].engine_args.max_model_len: the same argument as 'max-model-len'",
        ),
        (
            chain("inputs: [writer, writer]", "output: text", "final: true"),
            "12: stages[1].inputs: must not repeat an entry",
        ),
        (
            f"{SINGLE}    transform: join",
            "8: stages[0].transform: must be tokens, text, prompt_embeds, kv_transfer or "
            'package.module:function, not "join"',
        ),
        (chain("outputs: text"), f"12: stages[1].outputs: unknown key (did you mean 'output'?): use {STAGE_KEYS}"),
        (chain("replicas: -1", "outputs: text"), "12: stages[1].replicas: must be at least 0, not -1"),
        (
            chain("inputs: [writer]", "chunk_size: 8", "output: text"),
            "13: stages[1].chunk_size: only with async_chunk: true",
        ),
        (
            chain("async_chunk: false", "chunk_size: 8", "output: text"),
            "13: stages[1].chunk_size: only with async_chunk: true",
        ),
        (
            chain("async_chunk: true", "chunk_size: 0", "output: text"),
            "13: stages[1].chunk_size: must be at least 1, not 0",
        ),
        (f"{SINGLE}    min_prompt_tokens: 64", "8: stages[0].min_prompt_tokens: only with output: kv_cache"),
        (
            chain("<<: {final: true,", "     replicas: many}", "output: text"),
            '13: stages[1].replicas: must be a whole number, not "many"',
        ),
        (
            chain("output: text", "final: true").replace("id: 1", "id: 0"),
            "8: stages[1].id: 0 is the id of the stage 'writer' already",
        ),
        (
            chain("output: text", "final: true").replace("id: 1", "id: 2"),
            "8: stages[1].id: 2 leaves a gap: the ids of 2 stages count up from 0",
        ),
        (
            chain("output: text", "final: true").replace("refiner", "writer"),
            "9: stages[1].name: 'writer' is the name of the stage with id 0 already",
        ),
        (
            chain("inputs:", "  - writter", "output: text", "final: true"),
            "13: stages[1].inputs[0]: there is no stage 'writter' (did you mean 'writer'?): use one of writer, refiner",
        ),
        (
            chain("inputs: [refiner]", "output: text"),
            "12: stages[1].inputs: a stage would wait for its own output: refiner -> refiner",
        ),
        (
            chain("inputs: [writer]", "output: text").replace(
                "    name: writer\n", "    name: writer\n    inputs: [refiner]\n"
            ),
            "4: stages[0].inputs: a stage would wait for its own output: writer -> refiner -> writer",
        ),
        (
            SINGLE.replace("true", "false"),
            "1: stages: no stage is final: set 'final: true' where output leaves the pipeline",
        ),
        (
            chain("inputs: [writer]", "output: text"),
            "8: stages[1]: the stage 'refiner' reaches no final output: make it final or an input, or leave it out",
        ),
        (
            f"{SINGLE}    transform: text\n",
            "8: stages[0].transform: 'text' needs the output of a stage, and this one has no inputs",
        ),
        (
            chain("inputs: [writer]", "transform: prompt_embeds", "output: text", "final: true"),
            "13: stages[1].transform: 'prompt_embeds' does not take text of the stage 'writer': set 'transform' to "
            "'text' or 'tokens' or package.module:function",
        ),
        (
            DIAMOND.read_text().replace(', transform: "example.verdict:join"', ""),
            "3: stages[0]: no built-in transform takes the outputs of 3 stages: set 'transform' to "
            "package.module:function",
        ),
    ],
    ids=tail,
)
def test_invalid_files_are_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert complaint(file) == f"pipeline.yaml:{message}"
