"""One group for all tests of this folder.

Imports vLLM before any test does: importing it warns, and warnings are errors here.
"""

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.core  # noqa: F401

from tests.engine.experts import make_experts
from tests.engine.lockstep.group import HeadlessGroup, headless_group
from tests.engine.lockstep.heads import FrontEnd, Waves
from tests.engine.servers import Servers
from vllm_omni_plugin.vllm_api.launch.engine_launch import forbid_fork


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def group(
    servers: Servers, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HeadlessGroup]:
    servers.stop_all()
    forbid_fork()
    folder = tmp_path_factory.mktemp("group")
    (folder / "steps").mkdir()
    async with headless_group(make_experts(tiny_model, folder / "experts"), folder / "steps") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def heads(group: HeadlessGroup) -> AsyncIterator[list[FrontEnd]]:
    """Two heads that hold every rank."""
    found = [FrontEnd("one"), FrontEnd("other")]
    infos = await group.up()
    for head in found:
        await head.attach(infos, group.context)
    yield found
    for head in found:
        head.detach()


@pytest_asyncio.fixture(loop_scope="package")
async def waves(heads: list[FrontEnd]) -> AsyncIterator[Waves]:
    found = Waves.of(heads[0].ranks[0])
    # The wave of the test before may still run. It repeats itself every 5 s, so that whoever comes late hears it soon.
    await found.until(lambda publication: not publication.running)
    yield found
    await found.close()
