"""Reads admin keys. Imports little, because the command `vllm-omni-plugin` reads them, too."""

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.key_file import read_key_file

MIN_KEY_CHARS = 16


def read_admin_keys(path: str, flag: str) -> list[str]:
    """The keys in a file, one per non-empty line. Raises ConfigError if the file or a key is unusable."""
    place = f"argument {flag}: {path}"
    keys = read_key_file(path, place)
    if not keys:
        raise ConfigError(f"{place}: it has no key; give it one per line")
    for number, key in enumerate(keys, 1):
        if not key.isascii():
            raise ConfigError(f"{place}: key {number} is not ASCII, as a header requires")
        if len(key) < MIN_KEY_CHARS or " " in key or not key.isprintable():
            raise ConfigError(f"{place}: key {number} is not {MIN_KEY_CHARS} or more characters without spaces")
    return keys
