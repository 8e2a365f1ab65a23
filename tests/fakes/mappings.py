"""Mappings and descriptors of shared memory for frames in this process."""

from pathlib import Path

from vllm_omni_plugin.replicas.links.shared_memory import MEMORY_NAME


def mappings() -> list[range]:
    """Address ranges of the shared memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if MEMORY_NAME in line]
    return [range(*(int(address, 16) for address in line[0].split("-"))) for line in lines]


def is_shared(address: int) -> bool:
    return any(address in mapping for mapping in mappings())


def descriptors() -> list[str]:
    """Open descriptors of shared memory."""
    return [name for link in Path("/proc/self/fd").iterdir() if MEMORY_NAME in (name := _target(link))]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        # The descriptor of the listing itself.
        return ""
