"""The operators' HTTP server of a head with vLLM's Rust front end: `/omni`, `/metrics` and `/health`."""

import argparse
import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from vllm_omni_plugin.admin.admin_keys import LocalHead, local_addresses, new_local_key, publish_head
from vllm_omni_plugin.admin.hold import error_response, unavailable
from vllm_omni_plugin.admin.metrics.fleet_metrics import FleetCollector
from vllm_omni_plugin.admin.operator_actions import DRAINING, HeadDrain
from vllm_omni_plugin.admin.routes import build_router
from vllm_omni_plugin.admin.watch.watch_routes import build_watch_router
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import SHUTTING_DOWN, ConfigError
from vllm_omni_plugin.integration.http.operator_state import (
    OperatedFleet,
    has_api_key,
    make_access,
    set_operator_state,
    warn_of_open_access,
)
from vllm_omni_plugin.integration.options.admin_address import admin_address
from vllm_omni_plugin.integration.options.listening import not_bindable
from vllm_omni_plugin.integration.rust_front_end.model_prompts import ModelPrompts
from vllm_omni_plugin.integration.rust_front_end.replica_statistics import ReplicaStatistics
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.other_loop import call_on

logger = init_logger(__name__)

_STARTING = "The server is starting."
_CLOSE_TIMEOUT_S = 2
"""Seconds after which connections that are still answered are closed."""


class AdminServer:
    """Serves operators on the running loop, which must be that of the main thread, from `start` to `close`.

    `/health` is 200 while the head takes requests, else 503 with the reason as text. That of vLLM's Rust front end is
    200 while it has its engine, which is always. The fleet need not be started yet. Whoever takes new requests must
    refuse them while `drain` is active. The orchestrator's thread gives `statistics` what schedulers report.
    """

    def __init__(
        self,
        fleet: OperatedFleet,
        args: argparse.Namespace,
        options: OmniConfig,
        vllm_config: Any,
        *,
        drain: HeadDrain,
        is_starting: Callable[[], bool],
        is_ending: Callable[[], bool],
        adapters: Callable[[], Collection[str]],
    ) -> None:
        self._fleet = fleet
        self._args = args
        self._options = options
        self._config = vllm_config
        self._drain = drain
        self._is_starting = is_starting
        self._is_ending = is_ending
        self._adapters = adapters
        self._collector = FleetCollector(fleet.orchestrator)
        self.statistics = ReplicaStatistics(
            vllm_config, self._ledgers, self._record_soon, enabled=not args.disable_log_stats
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Raises ConfigError, naming the flag, if the address or the certificate cannot be used."""
        app = FastAPI(title="Fleet", openapi_url=None)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            **self._tls(),
        )
        try:
            config.load()
        except OSError as error:
            # Errors of TLS are among them.
            raise ConfigError(f"argument --ssl-certfile: {error}") from error
        listener = self._listen()
        warn_of_open_access(self._options)
        self._loop = asyncio.get_running_loop()
        REGISTRY.register(self._collector)
        self._add_routes(app)
        app.state.server = self._server = _Server(config)
        self._serving = asyncio.create_task(_serve(self._server, listener), name="omni-admin-server")
        url = self._url(listener.getsockname()[0])
        logger.info("The page for operators is %s/omni; Prometheus scrapes %s/metrics.", url, url)

    async def close(self) -> None:
        """End all streams, and close all connections once they are answered. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        assert self._server is not None
        self._server.should_exit = True
        await serving
        REGISTRY.unregister(self._collector)

    def _listen(self) -> socket.socket:
        host, port = admin_address(self._options, self._args)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # As vLLM's own server, the unspecified address of IPv6 takes IPv4, too.
            return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
        except OSError as error:
            raise not_bindable("--omni-admin-port", f"{host} port {port}", error) from error

    def _add_routes(self, app: FastAPI) -> None:
        # The front end's unix socket (`--uds`) is not this server's.
        access = make_access(self._args, has_api_key(self._args), self._publish_key)
        if access.has_key_file:
            self._publish_url("")
        app.include_router(build_router(access))
        app.include_router(build_watch_router(access))
        app.add_api_route("/metrics", self._metrics, include_in_schema=False)
        app.add_api_route("/health", self._health, include_in_schema=False)
        app.add_exception_handler(HTTPException, _error_like_openai)
        prompts = ModelPrompts(self._config, self._args.served_model_name or [self._args.model], self._adapters)
        set_operator_state(
            app.state,
            self._fleet,
            self._options,
            self._drain,
            read_prompt=prompts.read,
            is_ending=self._is_ending,
            is_over=lambda: self._serving is None,
            record_statistics=self.statistics.flush,
        )

    def _publish_key(self) -> str:
        """Make a key for commands of this user, which they find under either address of the head."""
        key = new_local_key()
        _, port = admin_address(self._options, self._args)
        publish_head(None, port, LocalHead(key))
        self._publish_url(key)
        return key

    def _publish_url(self, key: str) -> None:
        if not self._args.uds:
            publish_head(self._args.host, self._args.port, LocalHead(key, self._url(self._own_address())))

    def _own_address(self) -> str:
        host, _ = admin_address(self._options, self._args)
        return next(iter(local_addresses(host)), host)

    def _url(self, address: str) -> str:
        scheme = "https" if self._tls() else "http"
        _, port = admin_address(self._options, self._args)
        return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"

    def _tls(self) -> dict[str, Any]:
        """As the front end, where others can listen in. A certificate is not made out for a loopback address."""
        args = self._args
        if self._options.admin_key_file is None or not args.ssl_certfile:
            return {}
        return {
            "ssl_keyfile": args.ssl_keyfile,
            "ssl_certfile": args.ssl_certfile,
            "ssl_ca_certs": args.ssl_ca_certs,
            "ssl_cert_reqs": args.ssl_cert_reqs or ssl.CERT_NONE,
            **({"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}),
        }

    async def _metrics(self, request: Request) -> Response:
        self.statistics.flush()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), headers={"Content-Type": content_type})

    async def _health(self) -> Response:
        reason = self._why_closed()
        return PlainTextResponse(f"{reason}\n", HTTPStatus.SERVICE_UNAVAILABLE) if reason else Response()

    def _why_closed(self) -> str:
        """Why `/health` is 503: ending, drained, no replica, or vllm-rs not ready; else empty."""
        if self._is_ending():
            return SHUTTING_DOWN
        if self._drain.active:
            return DRAINING
        orchestrator = self._fleet.orchestrator
        if not orchestrator.can_serve:
            return str(unavailable(orchestrator))
        return _STARTING if self._is_starting() else ""

    def _ledgers(self) -> Iterator[tuple[int, LoadLedger]]:
        for pool in self._fleet.orchestrator.stage_pools:
            for member in pool.members:
                yield member.engine_index, member.ledger

    def _record_soon(self) -> None:
        call_on(self._loop, self.statistics.flush)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not the server's: it ends with the head."""
        yield


async def _serve(server: _Server, listener: socket.socket) -> None:
    try:
        with listener:
            await server.serve([listener])
    except Exception:
        logger.exception("The operators' HTTP server has failed; requests are still served.")


async def _error_like_openai(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    return error_response(error.detail, status, status.phrase, error.headers)
