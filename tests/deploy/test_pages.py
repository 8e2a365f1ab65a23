"""The pages about deployment: examples are rendered or run, and names exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.engine.server import until
from tests.project.source_tree import ROOT
from vllm_omni_plugin.ray.ray_command import parse

from .chart import CHART, SECRET, Manifests, render
from .flags import faults
from .slurm import Slurm
from .test_chart import WORKLOADS
from .test_compose import FILE as COMPOSE_FILE
from .test_systemd import UNITS

PAGES = ROOT / "docs" / "deploy"


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (PAGES / page).read_text(), flags=re.M | re.S)
    return [text for of, text in found if of == language]


def lines(page: str, program: str) -> list[list[str]]:
    """The words of a page's command lines that run a program."""
    text = "\n".join(blocks(page))
    return [shlex.split(line) for line in text.splitlines() if line.split()[:1] == [program]]


@pytest.fixture(scope="module")
def fleet() -> Manifests:
    """The page's example, with the values of its command line."""
    example = yaml.safe_load(blocks("kubernetes.md", "yaml")[0])
    example["servingEngineSpec"]["fleetSecret"] = SECRET
    return render(example)


def test_the_chart_accepts_the_pages_examples(fleet: Manifests) -> None:
    first, *more = (yaml.safe_load(text)["servingEngineSpec"] for text in blocks("kubernetes.md", "yaml"))
    assert "StatefulSet/fleet-llama-node" in fleet.names()
    nodes = "StatefulSet/fleet-llama-node"
    made = ({f"{nodes}-prefill", f"{nodes}-decode"}, {"PodMonitor/fleet-llama", "ScaledObject/fleet-llama-node"})
    for example, expected in zip(more, made, strict=True):
        models = [first["modelSpec"][0] | model for model in example["modelSpec"]]
        names = render({"servingEngineSpec": example | {"fleetSecret": SECRET, "modelSpec": models}}).names()
        assert expected <= set(names)


def test_the_commands_for_kubernetes_name_existing_objects(fleet: Manifests) -> None:
    ((_, _, release, chart, *_),) = lines("kubernetes.md", "helm")
    assert (release, ROOT / chart) == ("fleet", CHART)
    ((_, _, workload, _, container, *_),) = lines("kubernetes.md", "kubectl")
    assert container in [
        found["name"] for found in fleet.pod("Deployment", workload.removeprefix("deploy/"))["containers"]
    ]
    built = [line for line in lines("kubernetes.md", "docker") if line[1] == "build"]
    assert {line[3] for line in built} == {"deploy/Dockerfile"}
    assert (ROOT / "deploy" / "Dockerfile").is_file()
    images = {fleet.pod(*name)["containers"][0]["image"] for name in WORKLOADS}
    assert {line[line.index("-t") + 1] for line in built} == images
    assert {line[2] for line in lines("kubernetes.md", "docker") if line[1] == "push"} == images
    (address,) = set(re.findall(r"`http://([\w-]+)/v1`", (PAGES / "kubernetes.md").read_text()))
    assert fleet.get("Service", address)["spec"]["ports"][0]["port"] == 80


def test_the_times_of_the_page_are_the_charts_defaults() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["servingEngineSpec"]["modelDefaults"]
    text = (PAGES / "kubernetes.md").read_text()
    for group, name in (("nodeSpec", "drainTimeout"), ("headSpec", "preStopSleep"), ("headSpec", "shutdownTimeout")):
        assert f"`{group}.{name}` ({defaults[group][name]} s)" in text
    for name in ("expectedWaitSeconds", "waitingRequests"):
        assert f"`{name}` ({defaults['keda'][name]})" in text


def test_the_commands_for_slurm_start_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text('#!/bin/sh\necho "$*" >>"$CALLS"\nexec sleep 300\n')
    (tmp_path / "bin" / "vllm").chmod(0o755)
    calls = tmp_path / "calls"
    with Slurm(tmp_path, CALLS=str(calls), HOME=str(tmp_path)) as slurm:
        start, last = blocks("slurm.md")[0].rstrip().rsplit("\n", 1)
        assert len(slurm.submit(start)) == 5
        until(lambda: calls.exists() and len(calls.read_text().splitlines()) == 5, "a head and four nodes run")
        slurm.submit(last)
    assert (tmp_path / "fleet" / "fleet.secret").stat().st_mode & 0o777 == 0o600
    assert sum("--headless" in line for line in calls.read_text().splitlines()) == 4


def test_the_commands_for_systemd_name_existing_units() -> None:
    units = {path.name for path in UNITS.glob("*.service")}
    named = [word for line in lines("systemd.md", "systemctl") for word in line if word.startswith("vllm-omni")]
    assert {re.sub(r"@.*", "@", name) + ".service" for name in named} == units
    assert "deploy/systemd/*.service" in str(lines("systemd.md", "install"))


def test_the_variables_of_compose_are_those_of_its_page() -> None:
    table = re.findall(r"^\| (`[A-Z].*?) \| (.*?) \|", (PAGES / "compose.md").read_text(), flags=re.M)
    described = {}
    for names, defaults in table:
        described |= dict(zip(re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", "), strict=True))
    in_file = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE_FILE.read_text()))
    assert described.pop("MODEL") == "none"
    assert {name: "" if default == "none" else default for name, default in described.items()} == in_file


def test_the_commands_for_ray_are_valid() -> None:
    parsed = [stage for words in lines("ray.md", "vllm-omni-plugin") for stage in parse(words[2:])]
    assert [(args.replicas, args.max_replicas, args.num_gpus) for args, _ in parsed] == [
        (4, None, 1),
        (2, None, 1),
        (4, None, 2),
        (1, 8, 1),
    ]
    commands = [*lines("ray.md", "vllm"), *(["vllm", "serve", *serve] for _, serve in parsed)]
    assert [faults(command) for command in commands] == [[]] * 6
    assert [command[2] for command in commands] == ["MODEL", "--omni-pipeline", "MODEL"] + ["--omni-pipeline"] * 2 + [
        "MODEL"
    ]


def test_the_options_for_ray_are_those_of_its_page() -> None:
    described = {}
    for names, defaults in re.findall(r"^\| (`--.*?) \| (.*?) \|", (PAGES / "ray.md").read_text(), flags=re.M):
        options = re.findall(r"`--([\w-]+)`", names)
        described |= dict(zip(options, defaults.replace("`", "").split(", "), strict=True))
    ((args, _),) = parse(["up", "MODEL", "--omni-master-address", "head", "--omni-master-port", "7500"])
    parsed = vars(args)
    options = {name.replace("_", "-"): value for name, value in parsed.items() if name != "action"}
    assert set(described) == set(options)
    # None is a default that depends on other options.
    assert {name: value for name, value in options.items() if value is not None and str(value) != described[name]} == {}
