"""Loggers that write as vLLM's do."""

import logging


def init_logger(name: str) -> logging.Logger:
    """A logger below vLLM's own, so that its level, format and `VLLM_LOGGING_CONFIG_PATH` govern our lines too.

    vLLM configures the logger named "vllm" and lets its children propagate to it; a child needs no import of vLLM.
    """
    return logging.getLogger(f"vllm.{name}")
