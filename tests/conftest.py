"""What every test takes for granted."""

import atexit
import functools
import gc
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.keeping import Keep, keeping

# The gate draws a few examples, the same in every run; `make test-long` draws more, and anew.
_ANY_TIME = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", _ANY_TIME, derandomize=True, max_examples=40)
settings.register_profile("random", _ANY_TIME, print_blob=True)
settings.load_profile("fixed")

# To derive keys from a secret takes 40 ms, and tests have the same few secrets.
hashlib.scrypt = functools.cache(hashlib.scrypt)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Called in the process that hands out tests, if there are several lanes."""
    from tests.lanes import Lanes

    return Lanes(config, log)


def pytest_collection() -> None:
    """What is imported now is no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported by now lives as long as the run, so tests that collect garbage need not look through it."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # To take apart all that was imported costs each lane five seconds. Registered before them, so called last.
        atexit.register(os._exit, 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Libraries complain of what is left where a process is taken apart at its end."""
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


# Servers under test are on this machine: a proxy that the user's environment names must not come between.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
# The doctor lowers what vLLM logs in its process, which in some tests is this one, unless the user has chosen.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(autouse=True)
def visible_logs() -> None:
    """Importing vLLM anywhere in the run keeps the records of its loggers, and so of ours, from pytest.

    Building its app silences the root logger, too.
    """
    logging.getLogger("vllm").propagate = True
    # Setting a level makes thousands of loggers forget what they know of theirs.
    if logging.getLogger().level != logging.WARNING:
        logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for Unix sockets: their paths have 107 characters at most, and `tmp_path` is longer in a lane."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        yield Path(folder)


@pytest.fixture
def keep() -> Iterator[Keep]:
    with keeping() as keep:
        yield keep
