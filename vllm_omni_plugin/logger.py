"""Loggers below vLLM's logger, and texts that may be logged."""

import logging


def init_logger(name: str) -> logging.Logger:
    """A child of the logger "vllm", so vLLM's level, format and `VLLM_LOGGING_CONFIG_PATH` apply. Needs no vLLM."""
    return logging.getLogger(f"vllm.{name}")


def printable(text: str) -> str:
    """The text in one line without control characters, with which its sender could forge lines or move a cursor."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)
