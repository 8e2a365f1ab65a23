"""What all of these tests stand on."""

import pytest

from tests.contract.pipeline_http.app import Model, make_model
from tests.pipeline.files import SPEECH
from vllm_omni_plugin.pipeline import Pipeline, load_pipeline


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def speech() -> Pipeline:
    """Text of a thinker, spoken by a vocoder behind a talker."""
    return load_pipeline(SPEECH)
