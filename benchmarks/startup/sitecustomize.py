"""What every Python process that a benchmark starts does first, by way of its `PYTHONPATH`.

It asks for the processor's tile registers (AMX), as the engines of a fleet do by themselves: plain vLLM with one thread
dies of SIGILL at its first request where there are some. For `soak.py` it counts what is alive in it.
"""

import os

from alive_counts import VARIABLE, answer_for_ever

from vllm_omni_plugin.vllm_api.launch.tiles import ask_for_tiles

ask_for_tiles()
if VARIABLE in os.environ:
    answer_for_ever()
