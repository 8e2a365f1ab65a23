"""The differences between the supported versions of vLLM that matter to this package. Does not import vLLM.

Listed are differences that code or tests check, or for which there is code for the older form only. That code can be
removed once the version with the newer form is the oldest supported one; a test reports that.
"""

from dataclasses import dataclass

from vllm_omni_plugin.vllm_api.versions.supported import Release, installed_release


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        since: the first release with it.
        older: our code for earlier releases only; "" if there is none.
    """

    since: Release
    about: str
    older: str = ""

    @property
    def applies(self) -> bool:
        return installed_release() >= self.since


CLI_ARGS_MOVED = Difference(
    since=(0, 33),
    about="`entrypoints.launchers.cli_args` is `entrypoints.common.cli_args`",
    older="the second import in `serve_arguments`",
)
PAUSE_REFUSES = Difference(
    since=(0, 33),
    about="AsyncLLM pauses with `pause_generation`: in modes abort and wait an engine refuses requests until it "
    "resumes, see `EngineRefusals`",
    older="the condition in `EngineApi.refused`",
)
PROFILER_ARGUMENTS = Difference(
    since=(0, 33),
    about="`profile` has a fifth argument, for the profiler",
    older="its shorter form in `UtilityCallClient.profile_async`",
)
SELF_STARTED_WAVES = Difference(
    since=(0, 33),
    about="engines of a lockstep group start waves themselves; front ends no longer request them from the coordinator",
    older="`_STALE_WAVE` in `engine_api`",
)
DECISIONS_ROUTE = Difference(since=(0, 33), about="the server answers `/v1/decisions`")
RUST_FRONT_END = Difference(
    since=(0, 33),
    about="the Rust front end takes its sockets from its parent, and engines say in `EngineCoreOutput.error` why a "
    "request failed",
    older="the refusal of `VLLM_USE_RUST_FRONTEND` in `refuse_unsupported`",
)
