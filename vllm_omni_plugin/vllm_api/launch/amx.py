"""The tile registers (AMX) of x86 processors, which Linux gives only to processes that ask for them.

vLLM's attention for the CPU uses them in bfloat16. In an engine with one thread, as replicas have that divide the cores
of a small machine, nobody asks, and SIGILL ends it at its first request.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path

from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18
_TILES = "amx_tile"

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""


def request_amx(
    cpu_info: Path = CPU_INFO,
    machine: str = platform.machine(),
    system_call: Callable[..., int] | None = None,
) -> str:
    """Ask for the tile registers where there are some, for this whole process. Idempotent.

    Returns what is logged if they are refused, "" otherwise.

    An exec ends the permission, so every process must ask by itself.

    Args:
        cpu_info: where Linux describes the processor.
        machine: the processor's family; the number of the system call is that of x86-64.
        system_call: makes one; libc's if None.
    """
    if machine != "x86_64" or _TILES not in cpu_features(cpu_info):
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    if (system_call or libc.syscall)(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0:
        return ""
    reason = os.strerror(ctypes.get_errno())
    refusal = f"The system refuses the processor's tile registers (AMX): {reason}. Use --dtype float32."
    logger.warning("%s", refusal)
    return refusal


def cpu_features(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """What an x86 processor can do, by Linux's names; nothing for others."""
    try:
        with cpu_info.open() as lines:
            # All cores list the same.
            return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()
