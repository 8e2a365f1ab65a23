"""Serves a tiny model with two replicas on the CPU: one in the head, and one in a headless node.

    python examples/demo.py          leaves the fleet running until Ctrl-C
    python examples/demo.py --once   exits after the requests
    python examples/demo.py --rust   with vLLM's Rust front end (vLLM 0.33 and newer: .venv-0.33/bin/python)

Sends requests, shows how many each replica served, and kills the node in the middle of a stream, which goes on without
an error. The model and the logs are kept in build/demo, which git ignores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cpu"))

from tiny_model import make_tiny_model  # noqa: E402 (found through the line above)

WORK_FOLDER = HERE.parent / "build" / "demo"
HEAD_LOG = WORK_FOLDER / "head.log"
NODE_LOG = WORK_FOLDER / "node.log"
MODEL_NAME = "tiny"
REPLICAS = 2
STREAM_TOKENS = 600
CONCURRENT_REQUESTS = 32
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
# Without the proxies of the environment, since the server is on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """An error with a message for the user."""


@dataclass(frozen=True)
class Server:
    """A `vllm serve` process in its own process group. A headless node has no URLs."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    """Of the OpenAI server."""
    admin_url: str = ""
    """Of the routes under /omni and the metrics of the fleet."""

    def last_line(self) -> str:
        """The last log line, without vLLM's prefix."""
        lines = self.log.read_text(errors="replace").splitlines()
        return re.sub(r"^.*?\] ", "", lines[-1])[:80] if lines else "starting"

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def answers(self) -> bool:
        """Whether /health returns 200, from both servers where there are two."""
        try:
            for url in {self.url, self.admin_url}:
                DIRECT.open(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="exit after the requests")
    parser.add_argument("--rust", action="store_true", help="with vLLM's Rust front end")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run_demo(once=arguments.once, rust=arguments.rust)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 128 + signal.SIGINT
    except (DemoError, OpenAIError, OSError) as error:
        print(f"\ndemo failed: {error}\nThe logs: {HEAD_LOG}, {NODE_LOG}", file=sys.stderr)
        return 1
    return 0


def run_demo(*, once: bool, rust: bool) -> None:
    print("making a tiny model with random weights: its answers are random words")
    model = make_tiny_model(WORK_FOLDER / "model")
    master_port = free_port()
    with head(model, master_port, rust=rust) as server, node(model, master_port) as joining:
        wait_until_healthy(server)
        wait_until_joined(server, joining)
        direct = DefaultHttpxClient(trust_env=False)
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct) as client:
            send_completions(client)
            stream_chat(client)
        asyncio.run(send_concurrently(server))
        print_counts(assignments_by_replica(server))
        asyncio.run(kill_mid_stream(server, joining))
        if not once:
            with node(model, master_port):
                leave_running(server)


def head(model: Path, master_port: int, *, rust: bool) -> contextlib.AbstractContextManager[Server]:
    """Start the head: an API server with one replica, which nodes can join."""
    port, admin_port = free_port(), free_port()
    args = ["--host", "127.0.0.1", "--port", str(port)]
    if rust:
        args += ["--omni-admin-port", str(admin_port)]
    urls = [f"http://127.0.0.1:{number}" for number in (port, admin_port if rust else port)]
    environment = {"VLLM_USE_RUST_FRONTEND": "1"} if rust else {}
    return running(model, HEAD_LOG, master_port, environment | {"VLLM_CPU_OMP_THREADS_BIND": "0"}, args, urls)


def node(model: Path, master_port: int) -> contextlib.AbstractContextManager[Server]:
    """Start a headless node. On another machine it would need the head's address instead of loopback."""
    return running(model, NODE_LOG, master_port, {"VLLM_CPU_OMP_THREADS_BIND": "1"}, ["--headless"])


@contextlib.contextmanager
def running(
    model: Path, log: Path, master_port: int, own: dict[str, str], args: list[str], urls: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a server, and stop all its processes at the end of the block."""
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", str(model), "--served-model-name", MODEL_NAME, "--enforce-eager", "--max-model-len", "1024"),
        *("--omni-master-address", "127.0.0.1", "--omni-master-port", str(master_port)),
        *args,
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | own
    print(f"$ {' '.join(f'{name}={value}' for name, value in environment.items())} {shlex.join(command)}")
    print(f"  log: {log}")
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only this script, which stops the server
        )
    try:
        yield Server(process, log, *urls)
    finally:
        stop(process, "node" if "--headless" in args else "head")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def stop(process: subprocess.Popen[bytes], name: str) -> None:
    """Stop the server, wait a little, then kill the rest of its process group. Ctrl-C skips the wait."""
    try:
        if process.poll() is None:
            print(f"stopping the {name}")
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        print("it did not stop in time and is killed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(server: Server) -> None:
    """Show progress until the server can serve.

    Raises:
        DemoError: the server died, or took longer than START_TIMEOUT_S.
    """
    started = time.monotonic()
    shown = -1
    while not server.answers():
        elapsed = int(time.monotonic() - started)
        if server.process.poll() is not None:
            raise DemoError(f"the server died with status {server.process.returncode}:\n{server.tail()}")
        if elapsed > START_TIMEOUT_S:
            raise DemoError(f"the server does not answer after {elapsed} s:\n{server.tail()}")
        if elapsed // 3 != shown:
            shown = elapsed // 3
            print(f"  {elapsed:3d} s  {server.last_line()}", flush=True)
        time.sleep(0.25)
    print(f"ready after {time.monotonic() - started:.0f} s")


def wait_until_joined(server: Server, joining: Server) -> None:
    """Wait until the node's replica serves.

    Raises:
        DemoError: the node died, or took longer than START_TIMEOUT_S.
    """
    started = time.monotonic()
    while replicas_up(server) < REPLICAS:
        if joining.process.poll() is not None:
            raise DemoError(f"the node died with status {joining.process.returncode}:\n{joining.tail()}")
        if time.monotonic() - started > START_TIMEOUT_S:
            raise DemoError(f"the node did not join:\n{joining.tail()}")
        time.sleep(0.1)
    print(f"the node joined {time.monotonic() - started:.0f} s after the head was ready")


def replicas_up(server: Server) -> int:
    """Number of replicas that take requests, as in `vllm-omni-plugin replicas ls`."""
    with DIRECT.open(f"{server.admin_url}/omni/replicas", timeout=10) as response:
        return sum(replica["status"] == "up" for replica in json.load(response)["replicas"])


def send_completions(client: OpenAI) -> None:
    for prompt in ("Once upon a time", "The quick question"):
        answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=16, temperature=0)
        print(f"completion: {prompt!r} -> {answer.choices[0].text!r}")


def stream_chat(client: OpenAI) -> None:
    print("streaming chat: ", end="", flush=True)
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "How many engines are running?"}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


async def send_concurrently(server: Server) -> None:
    started = time.monotonic()
    direct = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL_NAME, prompt=f"Request number {number}", max_tokens=32)
                for number in range(CONCURRENT_REQUESTS)
            )
        )
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    elapsed = time.monotonic() - started
    print(f"{len(answers)} concurrent requests: {tokens} tokens in {elapsed:.1f} s")


async def kill_mid_stream(server: Server, victim: Server) -> None:
    """Start a stream on each replica, kill the node, and compare both streams with undisturbed answers.

    Raises:
        DemoError: a stream ended early, or its text differs from the undisturbed run.
    """
    direct = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct) as client:
        prompts = ("First stream", "Second stream")
        undisturbed = [await stream_to_end(client, prompt, asyncio.Event()) for prompt in prompts]
        under_way = [asyncio.Event() for _ in prompts]
        streams = [
            asyncio.create_task(stream_to_end(client, prompt, begun))
            for prompt, begun in zip(prompts, under_way, strict=True)
        ]
        for begun in under_way:
            await begun.wait()
        print("two streams are running, one on each replica: killing the node's processes")
        os.killpg(victim.process.pid, signal.SIGKILL)
        texts = [await stream for stream in streams]
    if texts != undisturbed:
        raise DemoError("a stream ended early or with another text")
    print(f"both streams finished, {STREAM_TOKENS} tokens each, with the text of an undisturbed run")


async def stream_to_end(client: AsyncOpenAI, prompt: str, begun: asyncio.Event) -> str:
    """The text of one stream; `begun` is set at its first chunk."""
    stream = await client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=STREAM_TOKENS, temperature=0, stream=True
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        begun.set()
    return text


def assignments_by_replica(server: Server) -> Counter[int]:
    """Number of requests of each replica, from the fleet's /metrics."""
    with DIRECT.open(f"{server.admin_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    counts: Counter[int] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm_omni_fleet:assignments_total":
                counts[int(sample.labels["replica"])] += int(sample.value)
    return counts


def print_counts(counts: Counter[int]) -> None:
    """Show how many requests each replica served.

    Raises:
        DemoError: a replica served no request.
    """
    print("requests served:")
    for replica in range(REPLICAS):
        print(f"  replica {replica}: {counts[replica]:3d} {'#' * counts[replica]}")
    if not all(counts[replica] for replica in range(REPLICAS)):
        raise DemoError("a replica served nothing; the server's log may say why")


def leave_running(server: Server) -> None:
    print(
        f"\nThe server runs at {server.url} until Ctrl-C. Try:\n"
        f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{MODEL_NAME}", "prompt": "Hello", "max_tokens": 16}}'\n"""
        f"  curl -s {server.admin_url}/metrics | grep vllm_omni",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.process.wait()
        raise DemoError(f"the server ended with status {server.process.returncode}:\n{server.tail()}")
    print()


if __name__ == "__main__":
    sys.exit(main())
