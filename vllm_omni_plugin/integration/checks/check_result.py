"""The result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity. Only an error prevents a start."""

    OK = "ok"
    UNKNOWN = "not known"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class CheckResult:
    """One line for the operator: what was checked, the result and, unless it is ok, what to do."""

    level: Level
    text: str
