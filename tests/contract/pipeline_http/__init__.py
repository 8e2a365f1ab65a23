"""The HTTP side of pipelines, with vLLM's own handlers and no engine."""
