"""Command lines without a model, where the file of a pipeline names it."""

import re
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

NO_MODEL = "<named by --omni-pipeline>"
"""Stands for the model on such a command line, until the file has been read."""
_PIPELINE = re.compile(r"--omni[-_]pipeline(=|$)")
_CONFIG = "--config"
_WRAPPED = "_vllm_omni_plugin_no_model"


def allow_no_model(parser_class: Any) -> None:
    """Let vLLM's parser take `--served-model-name` and `--config` without a model beside `--omni-pipeline`. Idempotent.

    Args:
        parser_class: vLLM's `FlexibleArgumentParser`. Whatever it accepts by itself, it reads as before.
    """
    own_parse_args = parser_class.parse_args
    if hasattr(own_parse_args, _WRAPPED):
        return

    @wraps(own_parse_args)
    def parse_args(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        try:
            return own_parse_args(self, args, namespace)
        except ValueError:
            words = list(sys.argv[1:] if args is None else args)
            if words[:1] != ["serve"] or not any(map(_PIPELINE.match, _with_config(self, words))):
                raise
        return own_parse_args(self, [words[0], NO_MODEL, *words[1:]], namespace)

    setattr(parse_args, _WRAPPED, True)
    parser_class.parse_args = parse_args


def _with_config(parser: Any, words: list[str]) -> list[str]:
    """The words and those of the file that `--config` names."""
    behind = words[words.index(_CONFIG) + 1 :][:1] if _CONFIG in words else []
    return [*words, *(word for name in behind for word in parser.load_config_file(name))]
