"""The base class of Python stages, and the lookup of a user's subclass by its name."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline import StageInput, StageOutput


@dataclass(frozen=True, slots=True)
class StageJob:
    """One input to compute.

    Attributes:
        input: the result of the stage's transform; its `sampling` includes that of the stage. Tensors are on the CPU
            and may share memory with the received message: do not change them in place.
        memory: a dict of the session, kept from chunk to chunk; empty at first.
        last: whether this is the last chunk of its session; always true if the stage does not work on chunks.
    """

    input: StageInput
    memory: dict[str, Any] = field(default_factory=dict)
    last: bool = True


class PythonStage(ABC):
    """A stage computed by Python code. Each replica has a process of its own.

    `start`, `compute` and `stop` are called one after the other on one thread, which does nothing else. The same input
    must always give the same output: if a replica is lost, another replica computes its requests again.

    Args:
        device: `cpu`, or the accelerator of this replica, such as `cuda:0`. Always `cpu` if the module of the class
            does not import torch.

    Subclasses may have more keyword arguments: the stage's `options` from the pipeline's file.
    """

    max_batch_size: ClassVar[int] = 8
    """Largest batch for `compute`. A batch starts at once with the inputs that wait; it never waits for more."""

    def __init__(self, *, device: str) -> None:
        self.device = device

    def start(self) -> None:  # noqa: B027  (optional for subclasses)
        """Load models and other resources; may take any time. If it raises, the replica does not start."""

    @abstractmethod
    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        """Compute a batch: one result for each job, in order.

        An exception in the results fails the request of its job only; a raised exception fails all jobs. For a
        `StageInputError` the client gets HTTP status 400, for other exceptions 500. A tensor may be on any device and
        must not be changed afterwards. The caller sets `finish_reason`.
        """

    def stop(self) -> None:  # noqa: B027
        """Free the resources of `start`; not called if `start` raised, or if the process is killed."""

    @staticmethod
    def cost(given: StageInput) -> int:
        """Estimate the cost of an input, in tokens; policies use it as the length of the prompt.

        By default it is the input's size. The head calls it on its event loop, so it must be fast.
        """
        rows = 0 if given.tensor is None or not given.tensor.shape else given.tensor.shape[0]
        return len(given.token_ids or ()) or len(given.text or "") or int(rows)


def stage_class(engine: str) -> type[PythonStage]:
    """Import the class `package.module:Class` of a Python stage, or raise ConfigError."""
    try:
        found = pkgutil.resolve_name(engine)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{engine} cannot be imported ({error!r}): correct the name, or add its folder to PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, PythonStage)):
        raise ConfigError(f"{engine} is not a subclass of vllm_omni_plugin.stages.PythonStage")
    if not isinstance(found.max_batch_size, int) or found.max_batch_size < 1:
        raise ConfigError(f"max_batch_size of {engine} is {found.max_batch_size!r}; it must be at least 1")
    return found
