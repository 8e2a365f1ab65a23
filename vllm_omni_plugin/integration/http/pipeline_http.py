"""A pipeline behind the HTTP server of vLLM."""

from fastapi import FastAPI

from vllm_omni_plugin.integration.engine_client.pipeline_calls import Abort
from vllm_omni_plugin.integration.http.pipeline_handler import PipelineHandler
from vllm_omni_plugin.integration.http.pipeline_speech import SpeechHandler, build_speech_router
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Modality


def serve_pipeline(app: FastAPI, pipeline: Pipeline, abort: Abort) -> None:
    """Wrap vLLM's handlers of chat and completions, and add the route of speech if the pipeline puts out audio.

    Args:
        app: vLLM's; its state has vLLM's serving objects, and None for what the model cannot do.
        pipeline: what it serves.
        abort: see `Abort`.
    """
    chat, completion = app.state.openai_serving_chat, app.state.openai_serving_completion
    if completion is not None:
        if Modality.AUDIO in pipeline.modalities:
            speech = SpeechHandler(completion, completion.create_completion, pipeline, abort)
            app.include_router(build_speech_router(speech))
        answers = PipelineHandler(completion, completion.create_completion, pipeline, abort, chat=False)
        completion.create_completion = answers.create
    if chat is not None:
        chat.create_chat_completion = PipelineHandler(
            chat, chat.create_chat_completion, pipeline, abort, chat=True
        ).create
