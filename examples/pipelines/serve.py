"""Makes tiny models and serves one of the example pipelines on the CPU.

python examples/pipelines/serve.py {prefill_decode,refiner,guarded,speech} [--models FOLDER] [flags of vllm serve]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_models import KINDS, make_models

HERE = Path(__file__).resolve().parent


def command(kind: str, flags: list[str]) -> list[str]:
    """The command line of the server; it runs in the folder of the models, to which the file's paths refer."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, "serve", "--omni-pipeline", str(HERE / f"{kind}.yaml"), *flags]


def environment() -> dict[str, str]:
    """The server's environment: the folder of `stages` in PYTHONPATH, little memory, and no network."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}


def serve(kind: str, models: Path, flags: list[str]) -> int:
    """Make the models, serve them until the server ends, and return its exit code."""
    make_models(kind, models)
    server = subprocess.Popen(command(kind, flags), cwd=models, env=environment())
    # The server gets a terminal's Ctrl-C itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    return server.wait()


def main() -> int:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, help="which example")
    parser.add_argument("--models", type=Path, help="folder to keep the models in; by default a temporary one")
    arguments, flags = parser.parse_known_args()
    if arguments.models is not None:
        return serve(arguments.kind, arguments.models.resolve(), flags)
    with tempfile.TemporaryDirectory() as folder:
        return serve(arguments.kind, Path(folder), flags)


if __name__ == "__main__":
    raise SystemExit(main())
