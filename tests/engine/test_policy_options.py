"""Options of policies on vLLM's command line: what is honoured, and what ends it with one line naming the option."""

import json
from typing import Any

import pytest

from .cli_probe import probe

ONE_LINE = "vllm serve: error: argument --omni-lb-config: "
REFUSED = {
    "not JSON": (["--omni-lb-config", "{x"], "'{x' is not JSON: "),
    "nothing": (["--omni-lb-config", ""], "'' is not JSON: "),
    "no object": (["--omni-lb-config", "[1]"], "'[1]' is not an object in JSON"),
    "policy without options": (
        ["--omni-lb-policy", "least-queue-length", "--omni-lb-config", '{"weight": 1}'],
        "load balancing policy 'least-queue-length': unknown option 'weight': it has no options",
    ),
    "unknown option": (
        ["--omni-lb-policy", "least-tokens", "--omni-lb-config", '{"decode_wait": 1}'],
        "load balancing policy 'least-tokens': unknown option 'decode_wait' (did you mean 'decode_weight'?): "
        "use decode_weight, kv_seconds",
    ),
    "out of range": (
        ["--omni-lb-policy", "least-tokens", "--omni-lb-config", '{"decode_weight": -1}'],
        "load balancing policy 'least-tokens': option decode_weight: -1 is out of range: give a number from 0 to 10",
    ),
    "on a node": (
        ["--headless", "-oma", "127.0.0.1", "-omp", "23900", "--omni-lb-config", "{}"],
        "not allowed with --headless: it is the head's",
    ),
}
LEAST_TOKENS = ["--omni-lb-policy", "least-tokens"]
HONOURED = {
    "JSON": [*LEAST_TOKENS, "--omni-lb-config", '{"decode_weight": 0.5}'],
    "a flag for each option": [*LEAST_TOKENS, "--omni-lb-config.decode_weight", "0.5"],
    "no options": ["--omni-lb-config", "{}"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How vLLM's parser and ours answer each command line, all in one process."""
    folder = tmp_path_factory.mktemp("options")
    file = folder / "fleet.yaml"
    file.write_text("omni-lb-policy: least-tokens\nomni-lb-config:\n  decode_weight: 0.5\n")
    lines = {name: arguments for name, (arguments, _) in REFUSED.items()} | HONOURED
    lines["a file"] = ["--config", str(file)]
    cases = folder / "cases.json"
    cases.write_text(
        json.dumps({name: {"arguments": ["some-model", *line], "environment": {}} for name, line in lines.items()})
    )
    return probe("refuse", cases, folder / "answers.json")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line_naming_flag_option_and_range(answers: Any, name: str) -> None:
    assert answers[name]["code"] == 2
    (line,) = [line for line in answers[name]["errors"].splitlines() if line.startswith("vllm serve: error: ")]
    assert line.startswith(ONE_LINE + REFUSED[name][1])


@pytest.mark.parametrize("name", [*HONOURED, "a file"])
def test_options_are_taken_from_the_command_line_and_from_a_file(answers: Any, name: str) -> None:
    assert answers[name]["code"] is None, answers[name]["errors"]
