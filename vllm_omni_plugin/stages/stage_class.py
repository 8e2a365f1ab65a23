"""Finding a user's class, and making its object in the process that it runs in."""

import pkgutil
import sys

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.stages.assignment import Assignment
from vllm_omni_plugin.stages.python_stage import PythonStage


def stage_class(engine: str) -> type[PythonStage]:
    """The class that a pipeline's file names as `package.module:Class`; its module is imported.

    Raises:
        ConfigError: it cannot be imported, or is no Python stage.
    """
    try:
        found = pkgutil.resolve_name(engine)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{engine} cannot be imported ({error!r})") from error
    if not (isinstance(found, type) and issubclass(found, PythonStage)):
        raise ConfigError(f"{engine} is no subclass of vllm_omni_plugin.stages.{PythonStage.__name__}")
    if not isinstance(found.max_batch_size, int) or found.max_batch_size < 1:
        raise ConfigError(f"max_batch_size of {engine} is {found.max_batch_size!r}; it must be at least 1")
    return found


def construct(assignment: Assignment) -> PythonStage:
    """The stage, not started.

    Raises:
        ConfigError: see `stage_class`.
        Exception: its constructor raised it.
    """
    # Before it is asked for a device: what it imports decides whether there is one.
    found = stage_class(assignment.engine)
    return found(**assignment.options, device=_device(assignment.device_index))


def _device(index: int) -> str:
    """The accelerator that a replica takes. A module that does without torch has no use for one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return "cpu"
    count = torch.accelerator.device_count()
    return f"{torch.accelerator.current_accelerator().type}:{index % count}"
