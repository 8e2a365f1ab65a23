"""The dashboards and rules of examples/monitoring, asked of real engines."""

import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.free_ports import free_port
from tests.monitoring.queries import FOLDER, all_queries, check, of_the_catalogue, recorded

from .pipelines import PipelineServer, shared_example
from .server import MODEL, Server, until
from .servers import Servers

MAY_BE_EMPTY = {"fleet.json: Decisions B"}
"""Queries that rightly get nothing where no policy has used less than its rule."""


def scrape_of(server: Server) -> dict[str, Set[str]]:
    """Names and labels of all that a server tells."""
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        scrape: dict[str, Set[str]] = {}
        for sample in (sample for family in families for sample in family.samples):
            scrape[sample.name] = scrape.get(sample.name, frozenset()) | sample.labels.keys()
        return scrape


def complete(server: Server) -> None:
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="Once upon a time there was a fleet.", max_tokens=4)


def test_every_query_asks_for_what_a_real_fleet_tells(fleet: Server) -> None:
    complete(fleet)
    scrape, ours = scrape_of(fleet), of_the_catalogue()
    # What a fleet has to tell depends on what it is and on what has happened.
    assert {name: labels for name, labels in scrape.items() if name in ours} == {
        name: labels for name, labels in ours.items() if name in scrape
    }
    known = recorded(scrape | ours)
    for query in all_queries():
        check(query, known)


class Prometheus:
    """The API of a Prometheus that runs the example's configuration."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str, **parameters: str) -> Any:
        """What the API answers; None while nothing listens."""
        try:
            answer = self._http.get(f"{path}?{urllib.parse.urlencode(parameters)}").json()
        except httpx.TransportError:
            return None
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, expr: str) -> list[Any]:
        data = self.get("query", query=expr)
        return [] if data is None else data["result"]

    def rules(self) -> list[Any]:
        data = self.get("rules")
        return [] if data is None else [rule for group in data["groups"] for rule in group["rules"]]


@contextmanager
def prometheus_of(server: Server, folder: Path) -> Iterator[Prometheus]:
    """Scrapes a server every second."""
    shutil.copytree(FOLDER, folder / "config")
    config = folder / "config" / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", "1s"))
    (folder / "config" / "heads.yml").write_text(f"- targets: ['127.0.0.1:{server.port}']\n")
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=10.0, trust_env=False) as http:
                yield Prometheus(http)
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def speech(servers: Servers) -> Iterator[PipelineServer]:
    yield from shared_example(servers, "speech", 3)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus")
def test_every_query_is_answered_by_prometheus_and_no_alert_fires(speech: PipelineServer, tmp_path: Path) -> None:
    queries = [query for query in all_queries() if not query.where.startswith("alerts.yml")]
    with prometheus_of(speech, tmp_path) as prometheus:

        def asked_and_counted() -> bool:
            with speech.client() as client:
                said: Any = [{"role": "user", "content": "Say something."}]
                answer: Any = {"modalities": ["text", "audio"], "audio": {"voice": "any", "format": "wav"}}
                client.chat.completions.create(model=MODEL, messages=said, max_tokens=8, **answer)
            return bool(prometheus.ask("job:vllm_e2e_request_latency_seconds:p95_rate5m > 0"))

        until(asked_and_counted, "requests are seen to come", 120.0)
        empty = {query.where for query in queries if not prometheus.ask(query.expr)}
        assert empty <= MAY_BE_EMPTY
        rules = prometheus.rules()
        assert {rule["health"] for rule in rules} == {"ok"}
        assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
