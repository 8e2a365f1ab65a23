"""The keys of those who may change a fleet. Imports little: the command `vllm-omni-plugin` reads them, too."""

import stat
from pathlib import Path

from vllm_omni_plugin.errors import ConfigError

MIN_KEY_CHARS = 16


def read_admin_keys(path: str, flag: str) -> list[str]:
    """The keys in a file, one per line that is not empty.

    Args:
        path: of the file.
        flag: that it was given by, for errors.

    Raises:
        ConfigError: it cannot be read, is no regular file, or holds no key or what cannot be one.
    """
    place = f"argument {flag}: {path}"
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(f"{place}: it is not a regular file")
        lines = Path(path).read_text("ascii").split("\n")
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: a header can carry ASCII characters only") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{place}: it has no key; give it one per line")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS or " " in key or not key.isprintable():
            raise ConfigError(f"{place}: key {number} is not {MIN_KEY_CHARS} or more characters without spaces")
    return keys
