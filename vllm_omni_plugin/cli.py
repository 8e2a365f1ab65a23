"""The command `vllm-omni-plugin`: operates a fleet, checks a pipeline or a machine, starts Ray or simulated nodes.

Commands that operate a fleet import neither vLLM nor a large library, so that they start in milliseconds.
"""

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from importlib.metadata import version
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from vllm_omni_plugin.admin.admin_keys import find_head_of, read_admin_keys
from vllm_omni_plugin.admin.watch.server_sent import LAST_EVENT_ID, MEDIA_TYPE, SILENT_S, read_messages
from vllm_omni_plugin.admin.watch.top import Top, table, with_current_names
from vllm_omni_plugin.cli_values import http_url, is_here, replica_id
from vllm_omni_plugin.errors import OmniError, ServerUnavailableError
from vllm_omni_plugin.logger import printable
from vllm_omni_plugin.vllm_api.versions.supported import RANGE, installed_version, why_unsupported

_NAME = "vllm-omni-plugin"
DEFAULT_URL = "http://127.0.0.1:8000"
ADMIN_KEY_VARIABLE = "OMNI_ADMIN_KEY"
_ADMIN_KEY_FLAG = "--admin-key-file"
_TIMEOUT_S = 30.0
_INTERRUPTED = 130
"""As shells count a command that SIGINT has ended."""
_REFRESH_S = 1.0
_UNAVAILABLE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
"""Statuses while there is no head, or while it has too many viewers."""
_LOAD_FIELDS = ("requests", "prefill_tokens", "decode_tokens", "kv_usage")
_COLUMNS = ("ID", "STATUS", "WHERE", "IN FLIGHT", "ASSIGNED", "RESTARTS", "SINCE", "CORDONS", "ADDRESS")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 if the server refuses or is silent, 130 after Ctrl-C. Wrong usage exits with 2."""
    args = _parser().parse_args(argv)
    if hasattr(args, "url") and (head := find_head_of(args.url)) is not None:
        # With vLLM's Rust front end the routes for operators have a server of their own.
        args.url = head.admin_url or args.url
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except OmniError as error:  # it may have words of a server
        sys.stderr.write(printable(f"{_NAME}: error: {error}") + "\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        reader_left = select.poll()
        reader_left.register(sys.stdout, 0)
        if not reader_left.poll(0):
            raise
        # Else Python writes the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Whoever asks a server has seen enough; a check or a supervisor is not done.
        return 0 if hasattr(args, "url") else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_NAME, description="Operate a fleet of vLLM replicas.")
    parser.add_argument("--version", action=_Versions, nargs=0, help="print this version and that of vLLM, and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_replicas(commands)
    _add_top(commands)
    _add_explain(commands)
    _add_admin_key(commands)
    _add_pipeline(commands)
    for name, run, about in (
        ("doctor", _doctor, "check this machine, and a node's command line against its head"),
        ("sim", _sim, "start simulated replicas that join a head"),
        ("ray", _ray, "run nodes on a Ray cluster"),
    ):
        # These commands parse all their arguments themselves. Without a prefix character nothing here is an option.
        parser_of_command = commands.add_parser(name, help=about, prefix_chars="\0", add_help=False)
        parser_of_command.add_argument("arguments", nargs="*")
        parser_of_command.set_defaults(run=run)
    return parser


class _Versions(argparse.Action):
    """Prints the versions. Looking them up is slow, so it is done on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        installed = installed_version()
        vllm = f"vLLM {installed}" if installed else "no distribution named vllm is installed"
        if installed and why_unsupported(installed):
            vllm += ", which is not supported"
        sys.stdout.write(f"{_NAME} {version(_NAME)}\n{vllm} (supported: {RANGE})\n")
        parser.exit()


def _add_replicas(commands: Any) -> None:
    replicas = commands.add_parser("replicas", help="see and change the replicas of a running server")
    actions = replicas.add_subparsers(metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="list all replicas")
    ls.set_defaults(run=_list)
    ls.add_argument("--json", action="store_true", help="print the server's answer as JSON instead of a table")
    drain = actions.add_parser("drain", help="give a replica no new requests; those in flight go on")
    resume = actions.add_parser("resume", help="undo drain")
    for action, parser in (("drain", drain), ("resume", resume)):
        parser.set_defaults(run=_change, action=action)
        parser.add_argument("id", type=replica_id, metavar="ID", help="<stage>.<replica>, as listed")
        parser.add_argument("--json", action="store_true", help="print the replica afterwards as JSON")
    for parser in (ls, drain, resume):
        _add_server(parser)


def _add_top(commands: Any) -> None:
    top = commands.add_parser("top", help="show replicas, their load and the last events, once a second until Ctrl-C")
    top.set_defaults(run=_top)
    top.add_argument("--once", action="store_true", help="show them once and end")
    _add_server(top)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="show where a prompt would go, and why, without running it")
    explain.set_defaults(run=_explain)
    explain.add_argument("prompt", metavar="PROMPT", help="text of a completion")
    explain.add_argument("--session", help="the session it belongs to")
    explain.add_argument("--model", help="the model's name, or an adapter's (default: the model)")
    explain.add_argument("--json", action="store_true", help="print the server's answer as JSON instead of a table")
    _add_server(explain)


def _add_admin_key(commands: Any) -> None:
    about = "print the admin key of this user's head on this machine, for other programs than this one"
    admin_key = commands.add_parser("admin-key", help=about)
    admin_key.set_defaults(run=_print_local_key)
    admin_key.add_argument("--url", type=http_url, default=DEFAULT_URL, help="of the head (default: %(default)s)")


def _add_pipeline(commands: Any) -> None:
    pipeline = commands.add_parser("pipeline", help="look at the file of a pipeline")
    actions = pipeline.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="check the file and list its stages in the order of their work")
    check.set_defaults(run=_check_pipeline)
    check.add_argument("file", metavar="FILE", help="the YAML file of stages")
    check.add_argument("--mermaid", action="store_true", help="print the graph as a Mermaid flow chart instead")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=http_url, default=DEFAULT_URL, help="the server's address (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        metavar="KEY",
        help="the server's API key (default: the environment variable VLLM_API_KEY)",
    )
    parser.add_argument(
        _ADMIN_KEY_FLAG,
        metavar="FILE",
        help="a file whose first line is an admin key of the server, for changes and explain (default: the key in the "
        f"environment variable {ADMIN_KEY_VARIABLE}, else that of this user's head on this machine)",
    )


def _list(args: argparse.Namespace) -> int:
    _print(_replicas(args), args.json)
    return 0


def _change(args: argparse.Namespace) -> int:
    _call(args, "POST", f"replicas/{args.id}/{args.action}")
    _print([replica for replica in _replicas(args) if replica["id"] == args.id], args.json)
    return 0


def _top(args: argparse.Namespace) -> int:
    top = Top(partial(_messages, args), sys.stdout, partial(time.sleep, _REFRESH_S))
    try:
        if args.once:
            top.once()
        else:
            top.run()
    except KeyboardInterrupt:
        pass
    except OmniError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise _not_a_fleet(args) from error
    return 0


def _messages(args: argparse.Namespace, last_event: str) -> Iterator[tuple[str, Any]]:
    headers = {"Accept": MEDIA_TYPE, LAST_EVENT_ID: last_event}
    with _answer(args, "GET", "fleet", headers=headers, timeout=SILENT_S) as response:
        yield from read_messages(response)


def _explain(args: argparse.Namespace) -> int:
    question = {name: value for name in ("prompt", "session", "model") if (value := getattr(args, name)) is not None}
    answer = _call(args, "POST", "explain", json.dumps(question).encode())
    try:
        decision = dict(json.loads(answer))
        output = json.dumps(decision, indent=2) + "\n" if args.json else _explanation(decision)
    except (ValueError, LookupError, TypeError) as error:
        raise _not_a_fleet(args) from error
    sys.stdout.write(output)
    return 0


def _explanation(decision: dict[str, Any]) -> str:
    fallback = f", fallback {decision['fallback']}" if decision["fallback"] else ""
    why = f"{decision['policy']}: {decision['reason']}{fallback}"
    summary = printable(f"{decision['prompt_tokens']} tokens would go to replica {decision['chosen']} ({why})") + "\n"
    columns = ("REPLICA", "SCORE", "MATCHED", *(name.upper().replace("_", " ") for name in _LOAD_FIELDS))
    rows = [_candidate_row(candidate) for candidate in decision["candidates"]]
    return summary + table([columns, *rows]) if rows else summary


def _candidate_row(candidate: dict[str, Any]) -> tuple[str, ...]:
    score = candidate["score"]
    return (
        candidate["replica"],
        "inf" if score is None else f"{score:.6g}",
        str(candidate["matched_tokens"]),
        *(f"{candidate[name]:.6g}" for name in _LOAD_FIELDS),
    )


def _print_local_key(args: argparse.Namespace) -> int:
    key = _local_key(args)
    if not key:
        raise OmniError(
            f"no head of this user on this machine keeps an admin key for {args.url}: give the --url of a head that "
            "runs here, with its address and not a name, without --omni-admin-key-file, as this user and with the same "
            "run-time directory"
        )
    sys.stdout.write(f"{key}\n")
    return 0


def _check_pipeline(args: argparse.Namespace) -> int:
    from vllm_omni_plugin.pipeline import load_pipeline, mermaid, summary

    if args.mermaid:
        sys.stdout.write(mermaid(load_pipeline(args.file)))
        return 0
    from vllm_omni_plugin.integration.fleet_setup.stage_checks import STAGE_CHECKS

    sys.stdout.write(table(summary(load_pipeline(args.file, STAGE_CHECKS))))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from vllm_omni_plugin.integration.doctor import run_doctor

    return run_doctor(args.arguments)


def _sim(args: argparse.Namespace) -> int:
    from vllm_omni_plugin.sim.sim_command import run_sim

    return run_sim(args.arguments)


def _ray(args: argparse.Namespace) -> int:
    from vllm_omni_plugin.ray.ray_command import run_ray

    return run_ray(args.arguments)


def _replicas(args: argparse.Namespace) -> list[dict[str, Any]]:
    answer = _call(args, "GET", "replicas")
    try:
        return [with_current_names(replica) for replica in json.loads(answer)["replicas"]]
    except (ValueError, LookupError, TypeError) as error:
        raise _not_a_fleet(args) from error


def _not_a_fleet(args: argparse.Namespace) -> OmniError:
    return OmniError(f"{args.url} answers, but it is not the server of a fleet")


def _call(args: argparse.Namespace, method: str, path: str, body: bytes | None = None) -> bytes:
    """The body of the server's answer. Raises OmniError with a message for the operator."""
    with _answer(args, method, path, body) as response:
        answer: bytes = response.read()
    return answer


@contextmanager
def _answer(
    args: argparse.Namespace,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_S,
) -> Iterator[HTTPResponse]:
    """The server's answer, to be read. Raises OmniError with a message for the operator, also while it is read."""
    key = _key(args, changes=method != "GET")
    sent = {**(headers or {}), "Authorization": f"Bearer {key}"} if key else dict(headers or {})
    if body is not None:
        sent["Content-Type"] = "application/json"
    try:
        request = Request(f"{args.url}/omni/{path}", body, sent, method=method)
        response = _opener(args.url).open(request, timeout=timeout)
    except HTTPError as error:
        with error:
            kind = ServerUnavailableError if error.code in _UNAVAILABLE else OmniError
            raise kind(_refusal(args, error, key)) from error
    except (OSError, HTTPException) as error:
        raise _no_answer(args, error) from error
    except ValueError as error:
        # Without the error's text, which may have the key.
        raise OmniError(
            f"HTTP does not allow a character of the key (--api-key, VLLM_API_KEY, {ADMIN_KEY_VARIABLE}) or of the "
            f"--url {args.url}: see that neither has line breaks"
        ) from error
    with response:
        try:
            yield response
        except (OSError, HTTPException) as error:
            raise _no_answer(args, error) from error


def _no_answer(args: argparse.Namespace, error: Exception) -> ServerUnavailableError:
    return ServerUnavailableError(f"no answer from {args.url}: {getattr(error, 'reason', error)}")


def _opener(url: str) -> OpenerDirector:
    """An opener that uses the proxy of the environment, except for servers on this machine."""
    return build_opener(_NoRedirect, *([ProxyHandler({})] if is_here(url) else []))


def _local_key(args: argparse.Namespace) -> str | None:
    head = find_head_of(args.url)
    return head.key or None if head is not None else None


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: urllib would send the key to any host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _key(args: argparse.Namespace, changes: bool) -> str | None:
    """The key to send. Changes prefer the admin key, since a server with admin keys accepts only these for changes."""
    if args.admin_key_file is not None:
        admin_key: str | None = read_admin_keys(args.admin_key_file, _ADMIN_KEY_FLAG)[0]
    else:
        admin_key = os.environ.get(ADMIN_KEY_VARIABLE) or _local_key(args)
    api_key: str | None = args.api_key
    return (admin_key or api_key) if changes else (api_key or admin_key)


def _refusal(args: argparse.Namespace, error: HTTPError, key: str | None) -> str:
    if location := error.headers["Location"]:
        return f"{args.url} redirects to {location}, which is not followed: give the --url of the server itself"
    try:
        message = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        message = error.reason
    if error.code == HTTPStatus.NOT_FOUND and message == HTTPStatus.NOT_FOUND.phrase:
        return (
            f"{args.url} has no such route: it is not the server of a fleet, or a head with vLLM's Rust front end: its "
            "routes for operators are at another port (--omni-admin-port, by default the next one): give that --url"
        )
    if error.code == HTTPStatus.UNAUTHORIZED:
        fault = "does not accept this key" if key else "wants a key"
        flags = f"give an API key with --api-key or in VLLM_API_KEY, an admin key with {_ADMIN_KEY_FLAG} or in"
        return f"{args.url} {fault} ({message}): {flags} {ADMIN_KEY_VARIABLE}"
    return f"{args.url} answers {error.code}: {message}"


def _print(replicas: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"replicas": replicas}, indent=2) + "\n")
        return
    sys.stdout.write(table([_COLUMNS, *map(_row, replicas)]))


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    since = replica["since_seconds"]
    return (
        replica["id"],
        replica["status"],
        "remote" if replica["remote"] else "local",
        str(replica["total_in_flight"]),
        str(replica["assigned"]),
        str(replica["restarts"]),
        "-" if since is None else f"{since:.0f} s",
        ", ".join(replica["cordons"]) or "-",
        ", ".join([replica["input_addr"] or "-", *replica.get("machines", ())[1:]])
        + f" {replica.get('other_generation', '')}".rstrip(),
    )
