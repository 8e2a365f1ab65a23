"""A head and headless nodes that join it, as processes."""

import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.fakes.free_ports import free_port

from .namespaces import HEAD_ADDRESS, Cable
from .server import START_S, ServeProcess, Server, serve_command, until, write_secret

_ENGINE = re.compile(r"\(process (\d+)\) serves")
_COORDINATOR = "vllm_omni_plugin.coordinator.process.coordinator_main"


class Node(ServeProcess):
    """One `vllm serve --headless` process."""

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(int(_ENGINE.findall(self.log.read_text())[-1]))

    def says(self, text: str) -> bool:
        return text in self.log.read_text()


class NodeFleet:
    """A head and its nodes, all with one secret. A context manager, at whose end they stop.

    Args:
        log: log of the head; the nodes' lie beside it.
        local: replicas of the head itself.
        sims: further nodes, with simulated engines.
        cable: the head and the nodes are at its two ends, if given, else all on loopback.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        nodes: int,
        *,
        local: int = 0,
        sims: int = 0,
        cable: Cable | None = None,
        flags: tuple[str, ...] = (),
        head_flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._model = model
        self._environment = environment or {}
        self._log = log
        self._cable = cable
        self.secret = write_secret(log.with_suffix(".secret"))
        self.master = ("127.0.0.1" if cable is None else HEAD_ADDRESS, free_port())
        self._flags = flags
        self._head_flags = ("--omni-dp-size-local", str(local), *head_flags)
        self._starts = 0
        self.nodes: list[Node] = []
        self.head = self._start_head()
        try:
            for _ in range(nodes):
                self.add_node()
            self.nodes += [self.start_sim() for _ in range(sims)]
            self.head.wait()
            self.wait_for_replicas(local + nodes + sims)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def tell_to_end(self) -> None:
        """Ask everything to end, and do not wait."""
        for process in (*self.nodes, self.head):
            process.tell_to_end()

    def stop(self) -> None:
        self.tell_to_end()
        for process in (*self.nodes, self.head):
            process.stop()

    def add_node(self, *flags: str) -> Node:
        """Start one more node; it joins on its own time."""
        command = serve_command(self._model, "--headless", *self.join, *self._flags, *flags)
        prefix = () if self._cable is None else self._cable.at_node
        node = Node([*prefix, *command], self._new_log("node"), **self._environment)
        self.nodes.append(node)
        return node

    def replace_node(self, node: Node) -> Node:
        self.nodes.remove(node)
        return self.add_node()

    def start_sim(
        self,
        *flags: str,
        model: Path | None = None,
        join: tuple[str, ...] | None = None,
        program: tuple[str, ...] | None = None,
    ) -> Node:
        """Start a node with simulated engines, which the caller must stop: fast, for what needs no real ones.

        Args:
            model: what it serves, if not what the others do.
            join: the flags that name the head and the secret, if not the true ones.
            program: what stands for `vllm-omni-plugin sim`.
        """
        sim = program or (str(Path(sys.executable).with_name("vllm-omni-plugin")), "sim")
        command = [*sim, *serve_command(model or self._model)[2:], *(join or self.join), *self._flags, *flags]
        return Node(command, self._new_log("sim"))

    def restart_head(self) -> None:
        """Start the head again, on the same ports, after it has ended."""
        self.head = self._start_head(port=self.head.port)

    def wait_for_replicas(self, count: int) -> None:
        """Return when exactly so many replicas take requests."""
        until(lambda: self.head.health() is not None, "the head answers", START_S)
        until(lambda: self.head.replicas_up() == count, f"{count} replicas take requests", START_S)

    @property
    def coordinator(self) -> psutil.Process | None:
        """The coordinator's process, None between two."""
        for process in psutil.Process(self.head.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if _COORDINATOR in process.cmdline():
                    return process
        return None

    @property
    def join(self) -> tuple[str, ...]:
        address, port = self.master
        return ("-oma", address, "-omp", str(port), "--omni-secret-file", str(self.secret))

    def _start_head(self, port: int | None = None) -> Server:
        return Server(
            self._model,
            self._new_log("head"),
            *self.join,
            *self._flags,
            *self._head_flags,
            namespace=None if self._cable is None else self._cable.head,
            port=port,
            # Short, because the path of a unix socket has 107 characters at most.
            uds=None if self._cable is None else Path(tempfile.mkdtemp(prefix="omni-"), "http"),
            **self._environment,
        )

    def _new_log(self, what: str) -> Path:
        self._starts += 1
        return self._log.with_name(f"{self._log.stem}-{self._starts}-{what}.log")
