"""`vllm-omni-plugin doctor`: what is wrong with this machine, and with the command line of a node."""

import argparse
import os
import sys
from collections.abc import Generator, Iterator, Sequence

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadQueryResult
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.checks.head_checks import (
    check_head,
    check_model,
    check_reachability,
    query_head_for_node,
)
from vllm_omni_plugin.integration.checks.machine_checks import check_machine, check_version
from vllm_omni_plugin.integration.flags import ANY_VLLM_PATTERN, CONFIG, parse_fleet_flags

_PROG = "vllm-omni-plugin doctor"
_DESCRIPTION = """Check this machine and, given the arguments of `vllm serve --headless`, whether a node with them would
start and join its head. No model is loaded. Each finding is a line; the exit status is 1 if one is an error."""
_EPILOG = """Takes every argument of `vllm serve MODEL --headless`. Without MODEL, or a pipeline, the model is not
compared with the head's."""
_MAX_PORT = 65535
_USUAL_WORKERS = 2
"""Of the smallest replica that needs shared memory, where no command line says how many there are."""
_FLAGS_FIT = CheckResult(Level.OK, "flags: they go together, and the files and addresses that they name can be used")
_NO_MODEL = CheckResult(Level.UNKNOWN, "model: none was named, so none is compared with the head's")


def run_doctor(arguments: Sequence[str]) -> int:
    """Print what is found, as it is found; returns the exit status."""
    is_well = True
    for finding in _examine(_with_head(arguments)):
        # What vLLM and transformers say may take several lines.
        sys.stdout.write(f"{finding.level:<11}{' '.join(finding.text.split())}\n")
        sys.stdout.flush()
        is_well = is_well and finding.level is not Level.ERROR
    return 0 if is_well else 1


def _with_head(arguments: Sequence[str]) -> list[str]:
    """The arguments of `vllm serve` among ours, with the flags for which `--against` is short."""
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
    ours, rest = parser.parse_known_args(arguments)
    return [*rest, *ours.against]


def _head(text: str) -> list[str]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, the head's master address and port, got {text!r}")
    return ["--omni-master-address", host.strip("[]"), "--omni-master-port", port]


def _examine(arguments: Sequence[str]) -> Iterator[CheckResult]:
    version = check_version(any(map(ANY_VLLM_PATTERN.match, arguments)))
    yield version
    yield from check_machine()
    if version.level is Level.ERROR:
        return
    # Lines of ours stand on standard output, and vLLM logs there as well.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_omni_plugin.integration.checks.start_checks import (
        check_head_files,
        check_node_files,
        check_shared_memory,
        check_socket_folder,
    )

    if arguments:
        yield from _examine_node(arguments)
    else:
        yield check_node_files(1)
        yield check_head_files(1)
        yield check_socket_folder()
        yield check_shared_memory(_USUAL_WORKERS)


def _examine_node(arguments: Sequence[str]) -> Iterator[CheckResult]:
    from vllm_omni_plugin.integration.checks.start_checks import check_start
    from vllm_omni_plugin.integration.options.flag_rules import check

    given, others = parse_fleet_flags(arguments, _PROG)
    answer = None
    # The file of `--config` may name the head or the secret, too.
    if given and CONFIG not in others:
        options = OmniConfig(**given)
        try:
            check(options, given, headless=True)
        except ConfigError as error:
            yield CheckResult(Level.ERROR, f"flags: {error}")
            return
        # Before vLLM is imported, which takes it many seconds.
        answer = yield from _check_against_head(options)
        if not others and options.pipeline is None:
            yield _FLAGS_FIT
            yield from check_start(options, options.dp_size_local, _USUAL_WORKERS, headless=True)
            yield _NO_MODEL
            return
    yield from _examine_command(arguments, answer)


def _check_against_head(options: OmniConfig) -> Generator[CheckResult, None, HeadQueryResult]:
    from vllm_omni_plugin.integration.options.listening import bind_address, coordinator_address, with_secret

    try:
        address = bind_address(options, headless=True)
        options = with_secret(options, address, headless=True)
    except ConfigError as error:
        yield CheckResult(Level.UNKNOWN, f"head: {error}")
        return HeadQueryResult()
    answer = query_head_for_node(coordinator_address(options), options, address, options.dp_size_local)
    yield from check_head(answer, options.stage_id)
    yield from check_reachability(answer)
    return answer


def _examine_command(arguments: Sequence[str], answer: HeadQueryResult | None) -> Iterator[CheckResult]:
    """What only vLLM can tell of a command line; `answer`: the head's, if it was asked."""
    from vllm_omni_plugin.integration.checks.start_checks import check_start
    from vllm_omni_plugin.integration.command_line import parse_options
    from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes
    from vllm_omni_plugin.integration.processes.headless import plan_node
    from vllm_omni_plugin.vllm_api.stages.stage_arguments import DEFAULT_MODEL
    from vllm_omni_plugin.vllm_api.versions.serve_arguments import parse_headless_args

    args = parse_headless_args(arguments, _PROG, _DESCRIPTION, _EPILOG, lambda parser: None)
    try:
        options = parse_options(args)
    except ConfigError as error:
        yield CheckResult(Level.ERROR, f"flags: {error}")
        return
    if options is None:
        yield CheckResult(Level.UNKNOWN, "flags: there is none of ours, hence no fleet: name the head with --against")
        return
    yield _FLAGS_FIT
    yield from check_start(options, *local_processes(args, options), headless=True)
    if answer is None:
        answer = yield from _check_against_head(options)
    if options.pipeline is None and args.model == DEFAULT_MODEL:
        yield _NO_MODEL
        return
    try:
        fingerprint = plan_node(args, options).fingerprint
    # Whatever a model's configuration makes vLLM and transformers raise.
    except Exception as error:
        yield CheckResult(Level.ERROR, f"model: vLLM cannot configure it: {error}")
    else:
        yield from check_model(answer, options.stage_id, fingerprint)
