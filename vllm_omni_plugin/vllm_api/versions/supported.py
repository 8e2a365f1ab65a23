"""The range of vLLM versions that this package is made for. Imports nothing of vLLM."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

Release = tuple[int, int]
"""The first two numbers of a version, which is what vLLM's interfaces change with."""

OLDEST: Release = (0, 32)
NEWEST: Release = (0, 33)
RANGE = "vLLM 0.32 or 0.33"
"""The same for people."""

_BASE = re.compile(r"v?(\d+)\.(\d+)")
_DISTRIBUTION = "vllm"


@cache
def installed_version() -> str:
    """The version of the installed vLLM, "" if it does not say. CPU builds have this name, too, or do not serve.

    It is read from disk once, since outputs ask for it.
    """
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def release_of(version_text: str) -> Release | None:
    """The release that a version belongs to, None if it names none.

    Nightlies and local builds count as the version that they are built from: `0.33.1rc2.dev7+g1234.cu129` is of 0.33.
    """
    found = _BASE.match(version_text)
    return None if found is None else (int(found[1]), int(found[2]))


def why_unsupported(version_text: str) -> str | None:
    """Why this package does not go with a version of vLLM, None if it does."""
    release = release_of(version_text)
    if release is not None and OLDEST <= release <= NEWEST:
        return None
    return f"this version of vllm-omni-plugin needs {RANGE}, and this is {version_text or 'one without a version'}"


def installed_release() -> Release:
    """The release of the installed vLLM. One outside the range counts as the end of it that is nearer."""
    release = release_of(installed_version())
    return NEWEST if release is None else min(max(release, OLDEST), NEWEST)
