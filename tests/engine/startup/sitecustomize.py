"""What every server that a test starts does first, by way of its `PYTHONPATH`.

It lets others have the processor:

vLLM's engine cores and workers wait for each other by calling `sched_yield` over and over. Linux 6.18 may let two
threads that do so keep a core from everybody else for seconds, even if they have a core each, and then any process of a
test looks dead to those that watch it. A sleep of no length gives the core away instead.

And a server without a fleet asks for the processor's tile registers as a fleet's engines do by themselves: plain vLLM
with one thread dies of SIGILL at its first request where there are some.

And it collects garbage less often: an eighth of the time that the import of vLLM takes would be looking for some.
"""

import gc
import os
import time

gc.set_threshold(10_000)
os.sched_yield = lambda: time.sleep(0)

if "ASK_FOR_TILES" in os.environ:
    from vllm_omni_plugin.vllm_api.launch.amx import request_amx

    request_amx()
