"""Parses `vllm serve` command lines as vLLM does, without starting anything; run by tests in processes of its own.

`python -m tests.engine.cli_probe invisible OUT CONFIG` writes what the installed plugin leaves in vLLM to OUT as JSON;
`python -m tests.engine.cli_probe refuse OUT CASES` reads command lines from CASES and writes how each was answered.
"""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


def probe(what: str, source: Path, out: Path, **environment: str) -> Any:
    """Run this module in a process of its own and return its report."""
    command = [sys.executable, "-m", "tests.engine.cli_probe", what, str(out), str(source)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def build_parser() -> Any:
    """The parser of `vllm serve`, made as vLLM's main function makes it."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers)
    return parser


def engine_args(parser: Any, command_line: list[str]) -> Any:
    """What vLLM's server makes of a command line before it makes anything else."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(["serve", *command_line])
    args.model = args.model_tag or args.model
    return AsyncEngineArgs.from_cli_args(args)


def ours_imported() -> list[str]:
    """Modules of this package that are imported by now."""
    return sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_omni_plugin")


def origins() -> dict[str, str]:
    """Where each function was written that stands between vLLM's server and its engines."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    functions = {
        f"{owner.__name__}.{name}": getattr(owner, name)
        for owner in (AsyncLLM, EngineCoreClient)
        for name in vars(owner)
    }
    return {
        name: f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        for name, function in functions.items()
        if hasattr(function, "__code__")
    }


def fields(instance: Any) -> dict[str, str]:
    """Every field of a dataclass, as text."""
    return {field.name: repr(getattr(instance, field.name)) for field in dataclasses.fields(instance)}


def capture(action: Callable[[], object]) -> dict[str, Any]:
    """Run something that may end the process: its exit code (None if it went on) and what it wrote."""
    output, errors = io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            action()
        except SystemExit as end:
            code = end.code
    return {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}


def register_in_engine_process() -> list[str]:
    """What our entry point imports in a process that parses no flags of vLLM's."""
    from vllm_omni_plugin.entrypoints.plugin import register

    before = set(sys.modules)
    register()
    return sorted(set(sys.modules) - before)


def wrapped_again_by_second_registration() -> bool:
    """Whether registering once more, in a process that parses flags, wraps anything again."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm_omni_plugin.entrypoints.plugin import register

    def hooks() -> tuple[object, object]:
        return EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

    before = hooks()
    register()
    return hooks() != before


def invisible(config: Path) -> dict[str, Any]:
    """What the plugin leaves in vLLM without its flags; with it loaded, then also what its flags do."""
    on = os.environ.get("VLLM_PLUGINS") != ""
    report: dict[str, Any] = {"imported_in_engine_process": register_in_engine_process() if on else []}
    parser = build_parser()
    report["engine_args"] = fields(engine_args(parser, ["some-model", "--max-model-len", "64"]))
    report["imported"] = ours_imported()
    report["origins"] = origins()
    if on:
        report["wrapped_again"] = wrapped_again_by_second_registration()
        report["help"] = capture(lambda: parser.parse_args(["serve", "--help=OmniConfig"]))["output"]
        report["from_config_file"] = engine_args(parser, ["some-model", "--config", str(config)]).additional_config
        report["origins_with_our_flags"] = origins()
    return report


def refuse(cases: Path) -> dict[str, Any]:
    """How each command line of a file is answered."""
    parser = build_parser()
    answers = {}
    for name, case in json.loads(cases.read_text()).items():
        with mock.patch.dict(os.environ, case["environment"]):
            answers[name] = capture(partial(engine_args, parser, case["arguments"]))
    return answers


def main() -> None:
    what, out, source = sys.argv[1:]
    # vLLM looks for its subcommand in the process's own arguments.
    sys.argv = ["vllm", "serve"]
    report = {"invisible": invisible, "refuse": refuse}[what](Path(source))
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
