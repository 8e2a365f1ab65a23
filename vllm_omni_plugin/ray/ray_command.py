"""The command `vllm-omni-plugin ray up`."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import count

from vllm_omni_plugin.cli_values import http_url
from vllm_omni_plugin.config import FLAGS, OmniConfig, integer, seconds
from vllm_omni_plugin.errors import ServerUnavailableError, did_you_mean
from vllm_omni_plugin.integration.flags import parse_fleet_flags
from vllm_omni_plugin.ray.autoscaler import Autoscaler, fetch_stage_load
from vllm_omni_plugin.ray.node_process import ReplicaMachines
from vllm_omni_plugin.ray.node_supervisor import NodeGroup, NodeSet, NodeSupervisor
from vllm_omni_plugin.ray.ray_nodes import NodeKind, RayNodes

_PROG = "vllm-omni-plugin ray"
_USAGE = f"{_PROG} up [options] MODEL [arguments of vllm serve] [--stage N [options and arguments of its nodes]] ..."
_STAGE, _STAGE_FLAG = "--stage", "--omni-stage-id"
_DESCRIPTION = """Run headless nodes as actors of a Ray cluster, and replace those that die. Ctrl-C or SIGTERM drains
all nodes. Other arguments go to `vllm serve --headless` on each node, which needs the head's --omni-master-address and
--omni-master-port. Start the head yourself, before or after this command."""
_TARGET_WAIT_S = 2.0
_OF_MACHINES = ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port")


def run_ray(arguments: Sequence[str]) -> int:
    stages = parse(arguments)
    kinds: list[NodeKind] = []
    numbers, groups = count(), []
    for args, serve in stages:
        given = OmniConfig(**parse_fleet_flags(serve, _PROG)[0])
        head = (str(given.master_address), given.master_port or 0)
        group = ReplicaMachines(args.machines, head) if args.machines > 1 else None
        kinds.append(NodeKind(serve, args.num_gpus, args.num_cpus, group))
        name = f" of stage {given.stage_id}" if len(stages) > 1 else ""
        groups.append(NodeGroup(NodeSet(given.drain_timeout, numbers), _wanted_nodes(args, given), name))
    with closing(RayNodes(stages[0][0].address, kinds)) as nodes:
        supervisor = NodeSupervisor(nodes, groups, time.monotonic, _print)

        def add_signal(*_: object) -> None:
            supervisor.signals += 1

        # After ray.init, which sets its own handlers.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, add_signal)
        # It ends nothing, as with `vllm serve` and our flags.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return 0 if supervisor.run() else 1


def parse(arguments: Sequence[str]) -> list[tuple[argparse.Namespace, list[str]]]:
    """The options of this command and the arguments of `vllm serve`, for the nodes of each `--stage`, or for all.

    What comes before the first `--stage` is for the nodes of all stages. Exits with code 2 on wrong usage.
    """
    parser = _parser()
    parts: list[list[str]] = [[]]
    for word in arguments:
        name, equals, number = word.partition("=")
        if name == _STAGE:
            parts.append([])
            word = f"{_STAGE_FLAG}{equals}{number}"
        parts[-1].append(word)
    common, *own = parts
    stages = [_parse_stage(parser, [*common, *part]) for part in own or [[]]]
    numbers = [parse_fleet_flags(serve, _PROG)[0].get("stage_id", 0) for _, serve in stages]
    if len(set(numbers)) < len(numbers):
        parser.error(f"argument {_STAGE}: {max(numbers, key=numbers.count)} is given twice")
    if len({args.address for args, _ in stages}) > 1:
        parser.error(f"argument --address: all stages use one Ray cluster: give it before the first {_STAGE}")
    return stages


def _parse_stage(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into our own and those for `vllm serve --headless`; refuse what does not fit together."""
    args, serve = parser.parse_known_args(arguments)
    # Users may separate the two parts with `--`, which some versions of argparse keep.
    serve = [word for word in serve if word != "--"]
    if args.max_replicas is None and (args.min_replicas, args.target_wait) != (None, None):
        parser.error("--min-replicas and --target-wait need --max-replicas")
    if args.max_replicas is not None and args.max_replicas < (args.min_replicas or 1):
        parser.error(f"--max-replicas {args.max_replicas} is below --min-replicas {args.min_replicas}")
    if args.target_wait == 0:
        parser.error("argument --target-wait: it must be above 0")
    if args.machines > 1 and not args.num_gpus + args.num_cpus:
        parser.error("argument --machines: it needs --num-gpus or --num-cpus, of each machine")
    given, others = parse_fleet_flags(serve, _PROG)
    known = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    for name in (word.partition("=")[0].replace("_", "-") for word in others):
        if name in _OF_MACHINES:
            parser.error(f"argument {name}: give --machines, and Ray chooses them")
        if name.startswith("--omni-"):
            parser.error(f"unknown argument {name}{did_you_mean(name, known)}")
    if not {"master_address", "master_port"} <= given.keys():
        parser.error("nodes need the head's --omni-master-address and --omni-master-port")
    return args, serve if "--headless" in serve else [*serve, "--headless"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("action", choices=["up"], help=argparse.SUPPRESS)
    # For the help: `parse` reads it.
    parser.add_argument(
        _STAGE,
        metavar="N",
        help="a stage of --omni-pipeline; what follows is for its nodes, what comes before the first one for all",
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--replicas", type=integer(1), default=1, metavar="N", help="nodes to run (default: 1)")
    number.add_argument("--max-replicas", type=integer(1), metavar="N", help="or as many as the wait needs, at most N")
    parser.add_argument("--min-replicas", type=integer(1), metavar="N", help="and at least N (default: 1)")
    parser.add_argument(
        "--target-wait",
        type=seconds,
        metavar="SECONDS",
        help=f"the wait for an engine above which nodes are added (default: {_TARGET_WAIT_S:g})",
    )
    parser.add_argument(
        "--url",
        type=http_url,
        help="a head's HTTP address, asked for the wait (default: port 8000 of the head); with vLLM's Rust front end "
        "that of its admin port",
    )
    parser.add_argument(
        "--machines", type=integer(1), default=1, metavar="N", help="machines of each replica (default: 1)"
    )
    parser.add_argument("--num-gpus", type=integer(0), default=1, metavar="N", help="GPUs of each machine (default: 1)")
    parser.add_argument("--num-cpus", type=integer(0), default=1, metavar="N", help="CPUs of each machine (default: 1)")
    parser.add_argument("--address", default="auto", help="the Ray cluster (default: the one of this machine)")
    return parser


def _wanted_nodes(args: argparse.Namespace, given: OmniConfig) -> Callable[[float], int]:
    """How many nodes there should be: fixed, or by the head's expected wait; the same number while it is unknown."""
    if args.max_replicas is None:
        return lambda now: int(args.replicas)
    autoscaler = Autoscaler(args.min_replicas or 1, args.max_replicas, args.target_wait or _TARGET_WAIT_S)
    head = str(given.master_address)
    url = args.url or f"http://{f'[{head}]' if ':' in head else head}:8000"
    failure = ""

    def wanted(now: float) -> int:
        nonlocal failure
        load, before, failure = None, failure, ""
        try:
            load = fetch_stage_load(url, given.stage_id)
        except ServerUnavailableError as error:
            failure = f"{error}; the number of nodes stays"
        if bool(failure) != bool(before):
            _print(failure or f"{url} reports the expected wait again")
        return autoscaler.wanted(now, load)

    return wanted


def _print(line: str) -> None:
    # The reader may be gone, for example if Ctrl-C ended the other side of a pipe.
    with suppress(OSError):
        sys.stderr.write(f"{_PROG}: {line}\n")
