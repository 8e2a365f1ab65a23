"""`vllm-omni-plugin doctor`: checks this machine, and the command line of a node."""

import argparse
import os
import sys
from collections.abc import Generator, Iterator, Sequence

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadQueryResult
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.checks.head_checks import check_head, check_model, query_head_for_node
from vllm_omni_plugin.integration.checks.machine_checks import check_machine, check_version
from vllm_omni_plugin.integration.flags import ANY_VLLM_PATTERN, CONFIG, parse_fleet_flags

_PROG = "vllm-omni-plugin doctor"
_DESCRIPTION = """Check this machine and, given the arguments of `vllm serve --headless`, whether a node with them would
start and join its head. No model is loaded. Each check is a line of output; the exit status is 1 if one is an error."""
_EPILOG = """Takes every argument of `vllm serve MODEL --headless`. Without MODEL, or a pipeline, the model is not
compared with the head's."""
_MAX_PORT = 65535
_ASSUMED_WORKERS = 2
"""Where no command line tells: the workers of the smallest replica that needs shared memory."""
_FLAGS_OK = CheckResult(Level.OK, "flags: valid, as are the files and addresses that they name")
_MODEL_NOT_COMPARED = CheckResult(Level.UNKNOWN, "model: none was named, so none is compared with the head's")


def run_doctor(arguments: Sequence[str]) -> int:
    """Run all checks and print each result as it comes; returns the exit status."""
    status = 0
    for result in _run_checks(_with_head(arguments)):
        # Messages of vLLM and transformers may have several lines.
        sys.stdout.write(f"{result.level:<11}{' '.join(result.text.split())}\n")
        sys.stdout.flush()
        if result.level is Level.ERROR:
            status = 1
    return status


def _with_head(arguments: Sequence[str]) -> list[str]:
    """The arguments of `vllm serve`: those given, with `--against` replaced by the two flags that it stands for."""
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} [--against HOST:PORT] [ARGUMENTS OF vllm serve --headless]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--against",
        type=_head,
        default=[],
        metavar="HOST:PORT",
        help="the head to compare with; short for --omni-master-address HOST --omni-master-port PORT",
    )
    known, rest = parser.parse_known_args(arguments)
    return [*rest, *known.against]


def _head(text: str) -> list[str]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, the head's master address and port, got {text!r}")
    return ["--omni-master-address", host.strip("[]"), "--omni-master-port", port]


def _run_checks(arguments: Sequence[str]) -> Iterator[CheckResult]:
    version = check_version(any(map(ANY_VLLM_PATTERN.match, arguments)))
    yield version
    yield from check_machine()
    if version.level is Level.ERROR:
        return
    # vLLM logs to standard output, where our results go.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_omni_plugin.integration.checks.start_checks import (
        check_head_files,
        check_node_files,
        check_shared_memory,
        check_socket_folder,
    )

    if arguments:
        yield from _check_node(arguments)
    else:
        yield check_node_files(1)
        yield check_head_files(1)
        yield check_socket_folder()
        yield check_shared_memory(_ASSUMED_WORKERS)


def _check_node(arguments: Sequence[str]) -> Iterator[CheckResult]:
    """Check flags, then the head, then, with vLLM imported, the whole command line."""
    from vllm_omni_plugin.integration.checks.start_checks import check_start
    from vllm_omni_plugin.integration.options.flag_rules import check

    given, others = parse_fleet_flags(arguments, _PROG)
    answer = None
    # The file of `--config` may name the head or the secret.
    if given and CONFIG not in others:
        options = OmniConfig(**given)
        try:
            check(options, given, headless=True)
        except ConfigError as error:
            yield CheckResult(Level.ERROR, f"flags: {error}")
            return
        # Before the import of vLLM, which takes many seconds.
        answer = yield from _check_against_head(options)
        if not others and options.pipeline is None:
            yield _FLAGS_OK
            yield from check_start(options, options.dp_size_local, _ASSUMED_WORKERS, headless=True)
            yield _MODEL_NOT_COMPARED
            return
    yield from _check_command_line(arguments, answer)


def _check_against_head(options: OmniConfig) -> Generator[CheckResult, None, HeadQueryResult]:
    from vllm_omni_plugin.integration.options.listening import bind_address, coordinator_address, with_secret

    try:
        options = with_secret(options, bind_address(options, headless=True), headless=True)
    except ConfigError as error:
        yield CheckResult(Level.UNKNOWN, f"head: {error}")
        return HeadQueryResult()
    answer = query_head_for_node(coordinator_address(options), options)
    yield from check_head(answer, options.stage_id)
    return answer


def _check_meeting(args: argparse.Namespace) -> CheckResult:
    from vllm_omni_plugin.integration.options.listening import resolve
    from vllm_omni_plugin.replicas.links.replica_ports import close_all
    from vllm_omni_plugin.replicas.machines.meeting_host import listen_for_machines

    first = f"{args.master_addr} port {args.master_port}"
    try:
        address = resolve(args.master_addr, "--master-addr")
        if args.node_rank:
            return CheckResult(Level.OK, f"machines: this one will meet the first one at {first}")
        close_all([listen_for_machines((address, args.master_port))])
    except ConfigError as error:
        # The name of the first machine may not be known before it is there.
        return CheckResult(Level.UNKNOWN if args.node_rank else Level.ERROR, f"machines: {error}")
    return CheckResult(Level.OK, f"machines: the others can meet this one at {first}")


def _check_command_line(arguments: Sequence[str], answer: HeadQueryResult | None) -> Iterator[CheckResult]:
    """The checks that need vLLM. `answer`: the head's, if it has been queried."""
    from vllm_omni_plugin.integration.checks.start_checks import check_start
    from vllm_omni_plugin.integration.command_line import parse_options
    from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes
    from vllm_omni_plugin.integration.processes.headless import plan_node
    from vllm_omni_plugin.vllm_api.versions.serve_arguments import parse_headless_args
    from vllm_omni_plugin.vllm_api.vllm_stages.stage_arguments import DEFAULT_MODEL

    args = parse_headless_args(arguments, _PROG, _DESCRIPTION, _EPILOG, lambda parser: None)
    try:
        options = parse_options(args)
    except ConfigError as error:
        yield CheckResult(Level.ERROR, f"flags: {error}")
        return
    if options is None:
        yield CheckResult(Level.UNKNOWN, "flags: no --omni-* flag is given: name the head with --against")
        return
    yield _FLAGS_OK
    yield from check_start(options, *local_processes(args, options), headless=True)
    if args.nnodes > 1:
        yield _check_meeting(args)
    if answer is None:
        answer = yield from _check_against_head(options)
    if options.pipeline is None and args.model == DEFAULT_MODEL:
        yield _MODEL_NOT_COMPARED
        return
    try:
        fingerprint = plan_node(args, options).fingerprint
    # vLLM and transformers raise any kind of error for a model's configuration.
    except Exception as error:
        yield CheckResult(Level.ERROR, f"model: vLLM cannot configure it: {error}")
    else:
        yield from check_model(answer, options.stage_id, fingerprint)
