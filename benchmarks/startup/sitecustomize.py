"""What every Python process that a benchmark starts does first, by way of its `PYTHONPATH`.

It asks for the processor's tile registers (AMX), as the engines of a fleet do by themselves: plain vLLM with one thread
dies of SIGILL at its first request where there are some.
"""

from vllm_omni_plugin.vllm_api.launch.amx import request_amx

request_amx()
