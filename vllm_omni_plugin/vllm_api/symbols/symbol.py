"""One entry in the list of what this package uses of vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symbol:
    """One thing of vLLM's that we name, read, call or replace.

    Attributes:
        path: its dotted path; the last part may be an attribute that exists on instances only.
        used_for: what would no longer work without it.
        positional: names of the parameters we pass by position, in order; None for what is not called.
        keywords: names of the parameters we pass by name.
    """

    path: str
    used_for: str
    positional: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
