"""What a check has found, in one line."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. Only an error keeps a process from starting."""

    OK = "ok"
    UNKNOWN = "not known"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class CheckResult:
    """One line for the operator.

    Attributes:
        level: how bad it is.
        text: what was looked at, what was found and, unless it is fine, what to do.
    """

    level: Level
    text: str
