"""What vLLM and this package find on this machine, whatever it will run. Imports nothing of vLLM."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, entry_points

from vllm_omni_plugin.integration.checks.finding import Finding, Level
from vllm_omni_plugin.vllm_api.launch.amx import cpu_features, request_amx
from vllm_omni_plugin.vllm_api.versions.supported import installed_version, why_unsupported

_GROUP = "vllm.general_plugins"
_OWN = "omni"
_OWN_MODULE = "vllm_omni_plugin."
_CLASHES = {
    "vllm-omni": "it has flags of the same names, and gets every command line with --omni: leave --omni out beside ours"
}
"""By distribution: what goes wrong beside it, and what to do."""


def version_finding(any_vllm: bool) -> Finding:
    """Whether the installed vLLM is supported, or at least wanted, by `--omni-any-vllm`."""
    version = installed_version()
    reason = why_unsupported(version)
    if reason is not None and any_vllm:
        return Finding(Level.WARNING, f"vLLM: {reason}; with --omni-any-vllm, anything may go wrong")
    if reason is not None:
        return Finding(Level.ERROR, f"vLLM: {reason}: install one of those, or another version of the plugin")
    return Finding(Level.OK, f"vLLM: {version}")


def machine_findings() -> Iterator[Finding]:
    """What is found, as it is found."""
    installed = {plugin.name: plugin.value for plugin in entry_points(group=_GROUP)}
    yield plugin_finding(installed, os.environ.get("VLLM_PLUGINS"))
    yield from clash_findings()
    yield processor_finding(platform.machine(), cpu_features(), installed_version(), request_amx())


def plugin_finding(installed: Mapping[str, str], allowed: str | None) -> Finding:
    """Whether vLLM loads this package.

    Args:
        installed: the general plugins, by name.
        allowed: the names that it may load, separated by commas; None: all.
    """
    if not installed.get(_OWN, "").startswith(_OWN_MODULE):
        return Finding(
            Level.ERROR,
            f"plugin: vLLM does not find it as {_OWN!r} of {_GROUP}: install vllm-omni-plugin into the environment of "
            f"{sys.executable}",
        )
    if allowed is not None and _OWN not in allowed.split(","):
        return Finding(Level.ERROR, f"plugin: VLLM_PLUGINS is {allowed!r} and leaves it out: add {_OWN}")
    others = ", ".join(sorted(set(installed) - {_OWN}))
    return Finding(Level.OK, f"plugin: vLLM loads it{f'; others in this environment: {others}' if others else ''}")


def clash_findings() -> Iterator[Finding]:
    """What other distributions that are installed do to this package."""
    for name, trouble in _CLASHES.items():
        with suppress(PackageNotFoundError):
            distribution(name)
            yield Finding(Level.WARNING, f"plugin: {name} is installed: {trouble}")


def processor_finding(machine: str, features: Set[str], version: str, tile_trouble: str) -> Finding:
    """Whether vLLM's build for CPUs, if it is that, can use the processor.

    Args:
        machine: the processor's family.
        features: what it can do, by Linux's names.
        version: of vLLM.
        tile_trouble: see `request_amx`.
    """
    of_use = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in features]
    told = f"processor: {machine} {' '.join(of_use)}".rstrip()
    if "cpu" not in version.partition("+")[2]:
        return Finding(Level.OK, told)
    if machine == "x86_64" and not of_use:
        return Finding(Level.ERROR, f"{told}: vLLM's build for CPUs needs AVX2 at least: use another machine")
    if tile_trouble:
        return Finding(Level.WARNING, f"{told}: {tile_trouble}")
    return Finding(Level.OK, told)
