"""In what the supported versions of vLLM differ, as far as this package notices. Imports nothing of vLLM.

Each difference is here once, whether code asks for it or takes both forms alike. What serves the older form only can go
when the version that brought the newer one is the oldest that is supported; a test says so then.
"""

from dataclasses import dataclass

from vllm_omni_plugin.vllm_api.versions.supported import Release, installed_release


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        since: the release that brought it.
        about: what is different from there on.
        older: what here serves the releases before, and can be dropped with them; "" if nothing does.
    """

    since: Release
    about: str
    older: str = ""

    @property
    def applies(self) -> bool:
        """Whether the installed vLLM has it."""
        return installed_release() >= self.since


CLI_ARGS_MOVED = Difference(
    since=(0, 33),
    about="`entrypoints.launchers.cli_args` is `entrypoints.common.cli_args`",
    older="the second import in `serve_arguments`",
)
PAUSE_REFUSES = Difference(
    since=(0, 33),
    about="AsyncLLM pauses by `pause_generation`: in modes abort and wait an engine refuses requests until it resumes, "
    "see `PausedRuns`",
    older="the question in `EngineApi.refused`",
)
PROFILER_ARGUMENTS = Difference(
    since=(0, 33),
    about="`profile` takes arguments of the profiler, in fifth place",
    older="the shorter of its forms in `call_arguments`",
)
EXTERNAL_ELASTIC_EP = Difference(
    since=(0, 33),
    about="AsyncLLM asks its engine client for the state of elastic expert parallelism, and may end it",
)
READY_ADDRESSES = Difference(
    since=(0, 33),
    about="a ready response brings the addresses of the coordinator of its lockstep group, and the port of its store",
)
INTERLEAVE_SIZE = Difference(
    since=(0, 33),
    about="workers' `set_kv_cache_layout` takes the interleave size of context parallelism as well",
    older="its default in `ModelFreeExecutor`'s worker",
)
LOOKAHEAD_TOKENS = Difference(
    since=(0, 33),
    about="a block's hash may depend on tokens behind it, which `BlockStored.lookahead_token_ids` has",
)
SELF_STARTED_WAVES = Difference(
    since=(0, 33),
    about="engines of a lockstep group start a wave themselves; front ends no longer ask the coordinator for it",
    older="`_STALE_WAVE` in `engine_api`",
)
DECISIONS_ROUTE = Difference(
    since=(0, 33),
    about="the server answers `/v1/decisions`",
)
