"""The load generator of vLLM, `vllm bench serve`, as a function."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from processes import MODEL_NAME, tool


def bench_serve(url: str, model: Path, seed: int, metrics: Sequence[str], *flags: str) -> dict[str, float]:
    """One run, whose requests get all the tokens they ask for.

    Args:
        url: of the server.
        model: that it serves, for the tokenizer.
        seed: of the requests.
        metrics: of which it takes the mean, the median and the 99th percentile.
        flags: more of its command line.

    Returns:
        What it writes to its file. It counts requests that fail, and does not fail for them.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [tool("vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url, *flags]
        command += ["--model", str(model), "--served-model-name", MODEL_NAME]
        command += ["--ignore-eos", "--seed", str(seed), "--disable-tqdm"]
        command += ["--percentile-metrics", ",".join(metrics), "--metric-percentiles", "99"]
        command += ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result: dict[str, float] = json.loads(Path(directory, "result.json").read_text())
    return result
