"""The process of a Python stage imports neither vLLM nor torch."""

import subprocess
import sys


def test_the_process_imports_neither_vllm_nor_torch_nor_the_head() -> None:
    script = (
        "import sys, vllm_omni_plugin.stages.stage_main\n"
        "heavy = {'vllm', 'torch', 'vllm_omni_plugin.orchestrator', 'vllm_omni_plugin.integration', 'jsonschema'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
