"""Entry of a Python stage's own process: ``python -m vllm_omni_plugin.stages.stage_main <descriptor> <name>``.

The descriptor is one end of a connection to the parent process. The parent sends `StageParameters`; the stage answers
with the reason why it cannot start, or with nothing if it has started. The connection ends when the parent exits.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from multiprocessing.connection import Connection

import msgspec
import zmq

from vllm_omni_plugin.errors import text_of
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory
from vllm_omni_plugin.stages.python_stage import PythonStage, stage_class
from vllm_omni_plugin.stages.socket_engine import LINGER_MS
from vllm_omni_plugin.stages.stage_engine import StageEngine
from vllm_omni_plugin.stages.stage_process import StageParameters
from vllm_omni_plugin.stages.stage_runner import StageRunner
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ready_response

logger = init_logger("vllm_omni_plugin.stages.stage_main")

_ORPHAN_ENDS_WITHIN_S = 10.0


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    connection = Connection(int(sys.argv[1]))
    parameters = msgspec.msgpack.decode(connection.recv_bytes(), type=StageParameters)
    logging.basicConfig(
        level=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        format=f"(Stage {parameters.stage} pid={os.getpid()}) %(levelname)s %(asctime)s [%(name)s] %(message)s",
    )
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    sys.path[:] = parameters.import_path
    with ThreadPoolExecutor(1, thread_name_prefix="stage") as executor:
        try:
            memory = _shared_memory(parameters)
            stage = executor.submit(_start, parameters).result()
        except Exception as error:
            logger.error("Stage '%s' cannot start.", parameters.stage, exc_info=error)
            connection.send_bytes(f"{type(error).__name__}: {text_of(error)}".encode())
            return 1
        connection.send_bytes(b"")
        asyncio.run(_serve(parameters, stage, executor, memory))
        executor.submit(stage.stop).result()
    return 0


def _start(parameters: StageParameters) -> PythonStage:
    # Before `_device`: only a module that imports torch gets a device.
    found = stage_class(parameters.engine)
    stage = found(**parameters.options, device=_device(parameters.device_index))
    stage.start()
    return stage


def _device(index: int) -> str:
    """The accelerator of a replica; `cpu` if nothing has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return "cpu"
    count = torch.accelerator.device_count()
    return f"{torch.accelerator.current_accelerator().type}:{index % count}"


def _shared_memory(parameters: StageParameters) -> SharedMemory | None:
    if parameters.memory_fd is None:
        return None
    try:
        return SharedMemory(parameters.memory_fd, 1)
    finally:
        os.close(parameters.memory_fd)


async def _serve(
    parameters: StageParameters, stage: PythonStage, executor: Executor, memory: SharedMemory | None
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        compute = StageRunner(stage, parameters.stage).compute
        engine = StageEngine(compute, executor, stage.max_batch_size, memory)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.end)
        ready = ready_response(parameters.replica_id)
        engine.connect(context, parameters.identity, parameters.input_addr, parameters.output_addrs, ready)
        await engine.ended
    finally:
        context.destroy(linger=LINGER_MS)


def _end_with_parent(connection: Connection) -> None:
    """End with the parent: let the stage finish its call, then exit by force."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_ENDS_WITHIN_S)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
