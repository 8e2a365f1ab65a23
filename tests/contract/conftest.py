"""Imports vLLM before any test does: importing it warns, and warnings are errors here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.async_llm
    import vllm.v1.worker.gpu_worker  # noqa: F401
