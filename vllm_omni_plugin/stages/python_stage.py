"""What a user writes: the base class of Python stages, and how a subclass is found by its name."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput


@dataclass(frozen=True, slots=True)
class StageJob:
    """One input to compute on.

    Attributes:
        input: what the stage's transform made; its `sampling` lies over that of the stage. Tensors are on the CPU and
            may share memory with what was received: do not change them in place.
        memory: kept from chunk to chunk of one session; empty at first.
        last: whether nothing follows in its session; always true where the stage waits for whole inputs.
    """

    input: StageInput
    memory: dict[str, Any] = field(default_factory=dict)
    last: bool = True


class PythonStage(ABC):
    """A stage computed by Python code, in a process of its own for each replica.

    `start`, `compute` and `stop` are called one after the other on one thread that does nothing else. The same input
    must always give the same output: a request whose replica is lost is computed again by another one.

    Args:
        device: where to compute: `cpu`, or the accelerator of this replica, such as `cuda:0`. It is `cpu` if the
            module of the class does not import torch.

    Subclasses may take more arguments by name: the stage's `options` from the pipeline's file.
    """

    max_batch_size: ClassVar[int] = 8
    """Inputs that `compute` gets at most. It gets what waits, and never waits for more."""

    def __init__(self, *, device: str) -> None:
        self.device = device

    def start(self) -> None:  # noqa: B027  (a stage that loads nothing is a whole one)
        """Load what is needed; may take as long as it takes. If it raises, the replica has not started."""

    @abstractmethod
    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        """Compute a batch: one result for each job, in order.

        An exception among the results fails the request of its job only; one that is raised fails those of all. A
        `StageInputError` tells the client that the request is at fault, any other one that the server is. A tensor may
        be on any device, and must not be changed afterwards; `finish_reason` is filled in by the caller.
        """

    def stop(self) -> None:  # noqa: B027
        """Free what `start` took; not called if that raised, or if the process is killed."""

    @staticmethod
    def cost(given: StageInput) -> int:
        """About how much it is to compute an input, in tokens: policies take it for the prompt's length.

        Its size by default. Called by the head, on the loop that chooses replicas, so it must be quick.
        """
        rows = 0 if given.tensor is None or not given.tensor.shape else given.tensor.shape[0]
        return len(given.token_ids or ()) or len(given.text or "") or int(rows)


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
        raise ConfigError(f"{engine} is no subclass of vllm_omni_plugin.stages.PythonStage")
    if not isinstance(found.max_batch_size, int) or found.max_batch_size < 1:
        raise ConfigError(f"max_batch_size of {engine} is {found.max_batch_size!r}; it must be at least 1")
    return found
