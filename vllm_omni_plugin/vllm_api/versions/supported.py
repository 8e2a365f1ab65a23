"""The range of supported vLLM versions. Does not import vLLM."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

Release = tuple[int, int]
"""Major and minor version: vLLM's interfaces change with these."""

OLDEST: Release = (0, 32)
NEWEST: Release = (0, 33)
RANGE = "vLLM 0.32 or 0.33"

_BASE = re.compile(r"v?(\d+)\.(\d+)")
_DISTRIBUTION = "vllm"


@cache
def installed_version() -> str:
    """The version of the installed vLLM, "" if unknown. Cached, since it is used for every output."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def release_of(version_text: str) -> Release | None:
    """The release of a version, None if it is not a version; of `0.33.1rc2.dev7+g1234.cu129` it is 0.33."""
    found = _BASE.match(version_text)
    return None if found is None else (int(found[1]), int(found[2]))


def why_unsupported(version_text: str) -> str | None:
    release = release_of(version_text)
    if release is not None and OLDEST <= release <= NEWEST:
        return None
    return f"this version of vllm-omni-plugin needs {RANGE}, and this is {version_text or 'one without a version'}"


def installed_release() -> Release:
    """The release of the installed vLLM, limited to the supported range."""
    release = release_of(installed_version())
    return NEWEST if release is None else min(max(release, OLDEST), NEWEST)
