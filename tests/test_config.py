"""The head's options as plain data."""

import json

import pytest

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError


@pytest.mark.parametrize(
    "config",
    [
        OmniConfig(),
        OmniConfig(lb_policy="random", dp_size_local=4, migration_limit=0),
        OmniConfig(lb_policy="least-tokens", lb_config={"decode_weight": 0.5}),
    ],
)
def test_options_survive_the_journey_as_json(config: OmniConfig) -> None:
    assert OmniConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config


def test_absent_options_have_their_defaults() -> None:
    assert OmniConfig.from_plain({"dp_size_local": 2}) == OmniConfig(dp_size_local=2)


def test_unknown_options_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown vllm-omni-plugin option\(s\): colour, weight"):
        OmniConfig.from_plain({"weight": 1, "colour": 2, "dp_size_local": 2})
