"""Loggers below vLLM's logger."""

import logging


def init_logger(name: str) -> logging.Logger:
    """A child of the logger "vllm", so vLLM's level, format and `VLLM_LOGGING_CONFIG_PATH` apply. Needs no vLLM."""
    return logging.getLogger(f"vllm.{name}")
