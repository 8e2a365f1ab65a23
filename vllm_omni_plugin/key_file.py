"""Reads files of keys or secrets. Imports little, because the command `vllm-omni-plugin` uses it, too."""

import os
import stat
from pathlib import Path

from vllm_omni_plugin.errors import ConfigError

_MAX_FILE_BYTES = 65_536


def read_key_file(path: str | Path, place: str, private: bool = False) -> list[str]:
    """Return the lines of a UTF-8 file, stripped and without empty ones.

    A `private` file must belong to this user alone. Raises ConfigError, which names the `place` where the path was
    given, if the file is unreadable, not regular, larger than 64 KiB, not UTF-8, or not private.
    """
    # Non-blocking, because opening a named pipe would wait for a writer.
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            fault = _fault(os.fstat(file.fileno()), private)
            if fault:
                raise ConfigError(f"{place}: {fault}")
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{place}: it is larger than {_MAX_FILE_BYTES} bytes")
        lines = content.decode().split("\n")
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: it is not UTF-8 text") from error
    return [line.strip() for line in lines if line.strip()]


def _fault(found: os.stat_result, private: bool) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if private and found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to the one running this process"
    if private and found.st_mode & 0o077:
        return f"others may access it (mode {stat.S_IMODE(found.st_mode):04o}); run `chmod 600` on it"
    return ""
