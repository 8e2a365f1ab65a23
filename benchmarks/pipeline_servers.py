"""Pipelines and plain servers of the same models, for the benchmark of pipelines."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from processes import MODEL_NAME, STARTUP, Process, start_server, total

EXAMPLES = Path(__file__).parents[1] / "examples" / "pipelines"
Stages = list[dict[str, Any]]
_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING"}


class Servers:
    """What is compared, all up at once. A context manager; leaving it ends everything.

    Args:
        folder: for models, files and one log per server.
        engine_args: of every vLLM engine.
    """

    def __init__(self, folder: Path, engine_args: Sequence[str]) -> None:
        self._folder = folder
        self._args = (*engine_args, "--served-model-name", MODEL_NAME, "--disable-uvicorn-access-log")
        self._stack = ExitStack()
        self._started: dict[str, Process] = {}

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def example(self, kind: str) -> Stages:
        """Stages of an example's file, with the paths of models that have just been made."""
        models = self._folder / kind
        subprocess.run([sys.executable, EXAMPLES / "tiny_models.py", kind, models], check=True)
        stages: Stages = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())["stages"]
        return [{**stage, "model": str(models / stage["model"])} if "model" in stage else stage for stage in stages]

    def pipeline(self, name: str, stages: Stages) -> str:
        """Start a pipeline; returns its URL."""
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"stages": stages}))
        return self._start(name, ("--omni-pipeline", str(file)))

    def plain(self, stage: Mapping[str, Any]) -> str:
        """Start vLLM's own server with the model of a stage; returns its URL."""
        flags = []
        for name, value in stage["engine_args"].items():
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return self._start(f"plain-{stage['name']}", (stage["model"], *flags))

    def wait(self) -> None:
        """Return when all answer. Raises RuntimeError if one does not."""
        for url, process in self._started.items():
            process.wait_until_healthy(url)

    def _start(self, name: str, what: Sequence[str]) -> str:
        modules = f"{STARTUP}:{EXAMPLES}"
        args = (*what, *self._args)
        process, url = start_server(name, args, self._folder / f"{name}.log", PYTHONPATH=modules, **_QUIET)
        self._stack.callback(process.stop)
        self._started[url] = process
        return url


def engine_seconds(url: str) -> float:
    """What a plain server's engine has spent on requests, from their first step to their last, by its own clock."""
    return total(url, "vllm:request_inference_time_seconds_sum")
