"""What is wrong with a pipeline, and where."""

from vllm_omni_plugin.documents import Place, worded
from vllm_omni_plugin.errors import ConfigError


class PipelineError(ConfigError):
    """Stages that make no pipeline."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(worded(message, place))
        self.message = message
        self.place = place
