"""Making the object of a user's class in the process that it runs in."""

import importlib
import sys

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.stages.assignment import Assignment
from vllm_omni_plugin.stages.base import PythonStage


def construct(assignment: Assignment) -> PythonStage:
    """The stage, not started.

    Raises:
        ConfigError: what is named is not a Python stage.
        Exception: its module or constructor raised it.
    """
    module_name, _, class_name = assignment.engine.partition(":")
    found = getattr(importlib.import_module(module_name), class_name, None)
    if found is None:
        raise ConfigError(f"module {module_name} has no class {class_name}")
    if not (isinstance(found, type) and issubclass(found, PythonStage)):
        raise ConfigError(f"{assignment.engine} is not a subclass of {PythonStage.__module__}.{PythonStage.__name__}")
    if not isinstance(found.max_batch_size, int) or found.max_batch_size < 1:
        raise ConfigError(f"max_batch_size of {assignment.engine} is {found.max_batch_size!r}; it must be at least 1")
    return found(**assignment.options, device=_device(assignment.device_index))


def _device(index: int) -> str:
    """The accelerator that a replica takes. A module that does without torch has no use for one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return "cpu"
    count = torch.accelerator.device_count()
    return f"{torch.accelerator.current_accelerator().type}:{index % count}"
