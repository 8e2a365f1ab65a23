"""Writes a secret file as the fleet demands it."""

from pathlib import Path


def write_secret(path: Path, secret: str, mode: int = 0o600) -> str:
    """Return the path of a file that has this secret, and of which nobody else can read anything."""
    path.touch(mode=mode)
    path.write_text(secret)
    return str(path)
