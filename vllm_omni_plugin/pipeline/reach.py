"""What leads to what in a graph."""

from collections.abc import Iterable, Mapping


def ancestors(inputs: Mapping[str, Iterable[str]], ends: Iterable[str]) -> set[str]:
    """Return the names in `ends` and all from which a path leads to one of them.

    Args:
        inputs: for every name, those with an edge to it.
        ends: where the paths end.
    """
    reached: set[str] = set()
    pending = list(ends)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += inputs[name]
    return reached
