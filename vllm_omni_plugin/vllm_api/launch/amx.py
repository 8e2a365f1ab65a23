"""The tile registers (AMX) of x86 processors, which Linux lets a process use only after it requests them.

vLLM's CPU attention uses them in bfloat16. An engine with one thread, as on a small machine with several replicas, does
not request them and dies of SIGILL at its first request.
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


def request_amx(
    cpu_info: Path = CPU_INFO, machine: str = platform.machine(), system_call: Callable[..., int] | None = None
) -> str:
    """Request the tile registers for this process, if the processor has them, and return the error message or "".

    Idempotent. `exec` ends the permission, so every process must request it. The arguments are for tests.
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
    """The feature flags of an x86 processor; empty for other processors."""
    try:
        with cpu_info.open() as lines:
            # All cores have the same flags.
            return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    except OSError:
        return frozenset()
