"""Checks of this machine that do not depend on what it will run. Imports nothing of vLLM."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, entry_points

from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.vllm_api.launch.amx import cpu_features, request_amx
from vllm_omni_plugin.vllm_api.versions.supported import installed_version, why_unsupported

_GROUP = "vllm.general_plugins"
_OWN = "omni"
_OWN_MODULE = "vllm_omni_plugin."
_CONFLICTS = {
    "vllm-omni": "it has flags of the same names, and handles --omni command lines: do not use --omni with our flags"
}
"""By distribution: the conflict, and what to do."""


def check_version(any_vllm: bool) -> CheckResult:
    """Check whether the installed vLLM is supported; `any_vllm`: `--omni-any-vllm` is given."""
    version = installed_version()
    reason = why_unsupported(version)
    if reason is not None and any_vllm:
        return CheckResult(Level.WARNING, f"vLLM: {reason}; with --omni-any-vllm, anything may go wrong")
    if reason is not None:
        return CheckResult(Level.ERROR, f"vLLM: {reason}: install one of those, or another version of the plugin")
    return CheckResult(Level.OK, f"vLLM: {version}")


def check_machine() -> Iterator[CheckResult]:
    """Run all checks but that of the version."""
    installed = {plugin.name: plugin.value for plugin in entry_points(group=_GROUP)}
    yield check_plugin(installed, os.environ.get("VLLM_PLUGINS"))
    yield from check_conflicts()
    yield check_processor(platform.machine(), cpu_features(), installed_version(), request_amx())


def check_plugin(installed: Mapping[str, str], allowed: str | None) -> CheckResult:
    """Check whether vLLM loads this package, from the entry points by name and the value of VLLM_PLUGINS."""
    if not installed.get(_OWN, "").startswith(_OWN_MODULE):
        return CheckResult(
            Level.ERROR,
            f"plugin: vLLM does not find it as {_OWN!r} of {_GROUP}: install vllm-omni-plugin into the environment of "
            f"{sys.executable}",
        )
    if allowed is not None and _OWN not in allowed.split(","):
        return CheckResult(Level.ERROR, f"plugin: VLLM_PLUGINS is {allowed!r} and does not have it: add {_OWN}")
    others = ", ".join(sorted(set(installed) - {_OWN}))
    return CheckResult(Level.OK, f"plugin: vLLM loads it{f'; others in this environment: {others}' if others else ''}")


def check_conflicts() -> Iterator[CheckResult]:
    for name, trouble in _CONFLICTS.items():
        with suppress(PackageNotFoundError):
            distribution(name)
            yield CheckResult(Level.WARNING, f"plugin: {name} is installed: {trouble}")


def check_processor(machine: str, features: Set[str], version: str, tile_trouble: str) -> CheckResult:
    """Check whether the processor can run vLLM, if that is a build for CPUs. `tile_trouble`: see `request_amx`."""
    of_use = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in features]
    state = f"processor: {machine} {' '.join(of_use)}".rstrip()
    if "cpu" not in version.partition("+")[2]:
        return CheckResult(Level.OK, state)
    if machine == "x86_64" and not of_use:
        return CheckResult(Level.ERROR, f"{state}: vLLM's build for CPUs needs AVX2 at least: use another machine")
    if tile_trouble:
        return CheckResult(Level.WARNING, f"{state}: {tile_trouble}")
    return CheckResult(Level.OK, state)
