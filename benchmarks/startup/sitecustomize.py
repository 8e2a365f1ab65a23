"""What every Python process that a benchmark starts does first, by way of its `PYTHONPATH`.

It asks for the processor's tile registers (AMX), as the engines of a fleet do by themselves: plain vLLM with one thread
dies of SIGILL at its first request where there are some. For `soak.py` it counts what is alive in it, for `threads.py`
it names its threads.
"""

import os

from vllm_omni_plugin.vllm_api.launch.amx import request_amx

request_amx()
# `alive_counts.VARIABLE`; without it, nothing of that module is imported, as it would be measured, too.
if "BENCHMARK_ALIVE_COUNTS" in os.environ:
    from alive_counts import answer_for_ever

    answer_for_ever()
# `measured_threads.VARIABLE`, likewise.
if "BENCHMARK_THREADS" in os.environ:
    from measured_threads import prepare

    prepare()
