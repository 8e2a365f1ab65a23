"""The head's options as plain data."""

import pytest

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError


def test_unknown_options_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown vllm-omni-plugin option\(s\): colour, weight"):
        OmniConfig.from_plain({"weight": 1, "colour": 2, "dp_size_local": 2})
