"""The batch scripts of Slurm with real engines; `tests/deploy/test_slurm.py` shows what they do without."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.slurm import Slurm, has_ended
from tests.fakes.free_ports import free_port

from .server import MODEL, START_S, serve_command, serve_environment, until, write_secret

TOKENS = 400


@pytest.mark.long
def test_a_head_and_an_array_of_nodes_serve_and_a_node_that_slurm_ends_costs_no_request(
    tiny_model: Path, tmp_path: Path
) -> None:
    write_secret(tmp_path / "fleet.secret")
    flags = " ".join(serve_command(tiny_model)[3:])
    http, master = free_port(), free_port()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").symlink_to(Path(sys.executable).with_name("vllm"))
    environment = serve_environment(
        OMNI_HEAD_ADDRESS="127.0.0.1", OMNI_MASTER_PORT=str(master), OMNI_HTTP_PORT=str(http)
    )
    with Slurm(tmp_path, **{name: value for name, value in environment.items() if name != "PATH"}) as slurm:
        (head,) = slurm.submit(f"sbatch examples/slurm/head.sbatch {tmp_path} {tiny_model} {flags}")
        nodes = slurm.submit(f"sbatch --array=0-1 examples/slurm/nodes.sbatch {tmp_path} {tiny_model} {flags}")
        with httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=120.0) as client:

            def replicas() -> list[str]:
                try:
                    found = client.get("/omni/replicas").raise_for_status().json()["replicas"]
                except httpx.TransportError:
                    return []
                return [replica["status"] for replica in found]

            def ask(number: int) -> tuple[int, int]:
                body = {"model": MODEL, "prompt": f"count {number}", "max_tokens": TOKENS, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                return answer.status_code, answer.json()["usage"]["completion_tokens"]

            until(lambda: replicas() == ["up", "up"], "both nodes serve", START_S)
            with ThreadPoolExecutor(4) as clients:
                answers = [clients.submit(ask, number) for number in range(8)]
                # What Slurm does before the time of a job is over.
                nodes[0].send_signal(signal.SIGTERM)
                assert [answer.result() for answer in answers] == [(200, TOKENS)] * 8
            until(lambda: has_ended(nodes[0]), "the node's job ends", 60)
            assert replicas().count("up") == 1
            assert ask(9) == (200, TOKENS)
            for job in (head, nodes[1]):
                job.send_signal(signal.SIGTERM)
                until(lambda job=job: has_ended(job), "the job ends", 60)
