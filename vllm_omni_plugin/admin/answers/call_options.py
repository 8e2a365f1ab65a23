"""Reads the pipeline's fields of a request body: OpenAI's `modalities` and `audio`, and our `omni`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_omni_plugin.errors import OmniError, did_you_mean
from vllm_omni_plugin.pipeline import ANSWERS, Modality, Pipeline
from vllm_omni_plugin.vllm_api.engine_messages.request_building import TRANSFER_PARAMS

OMNI_KEYS: Final = ("outputs", "params", "sampling", "timings")
AUDIO_FORMATS: Final = ("wav", "pcm16")

_SENDABLE: Final = {Modality.TEXT, Modality.TOKENS, Modality.SCORES, Modality.EMBEDDING, Modality.AUDIO}
"""Modalities that can be sent as JSON."""
_NOT_RUN: Final = "no stage {} runs for this request"


class BadOptionError(OmniError, ValueError):
    """The body asks for something that the pipeline does not support. `param` is the field, such as `omni.outputs`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a request asks of a pipeline.

    `outputs` are the stages whose outputs are added to the answer; `sampling` has parameters by stage name; `params`
    are values for transforms and Python stages.
    """

    modalities: tuple[Modality, ...]
    audio_format: str = ""
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    timings: bool = False

    @property
    def audio(self) -> bool:
        return Modality.AUDIO in self.modalities

    @property
    def shows(self) -> bool:
        """Whether the answer has more than vLLM's own answer."""
        return self.audio or self.timings or bool(self.outputs)

    @property
    def text(self) -> bool:
        return not ANSWERS.isdisjoint({*self.modalities} - {Modality.AUDIO})


def read_call_options(fields: Mapping[str, Any], pipeline: Pipeline) -> CallOptions:
    """Read the fields `modalities`, `audio` and `omni` of a body. Raises BadOptionError for an invalid one."""
    modalities = _modalities(fields.get("modalities"), pipeline)
    omni = _mapping(fields.get("omni"), "omni")
    _require_known(omni, OMNI_KEYS, "there is no key {}", "omni")
    audio = _mapping(fields.get("audio"), "audio")
    if audio and Modality.AUDIO not in modalities:
        raise BadOptionError("`audio` is given, but `modalities` does not ask for audio.", "audio")
    _require_known(audio, ("voice", "format"), "there is no key {}", "audio")
    timings = omni.get("timings", False)
    if not isinstance(timings, bool):
        raise BadOptionError("`omni.timings` must be true or false.", "omni.timings")
    params = dict(_mapping(omni.get("params"), "omni.params"))
    if (voice := audio.get("voice")) is not None:
        params.setdefault("voice", _text(voice, "audio.voice"))
    return CallOptions(
        modalities=modalities,
        audio_format=_format(audio),
        outputs=_outputs(omni.get("outputs"), modalities, pipeline),
        sampling=_sampling(omni.get("sampling"), modalities, pipeline),
        params=params,
        timings=timings,
    )


def _modalities(given: Any, pipeline: Pipeline) -> tuple[Modality, ...]:
    """What the client gets: what it asks for, or the default; refused if this route cannot return it."""
    if given is None:
        return pipeline.default_modalities
    names = _names(given, "modalities")
    _require_known(names, pipeline.modalities, "there is no modality {}", "modalities")
    asked = tuple(modality for modality in pipeline.modalities if modality in names)
    if ANSWERS.isdisjoint(asked):
        has = ", ".join(pipeline.modalities)
        message = f"`modalities` asks for no output that this route can return: the pipeline has {has}."
        raise BadOptionError(message, "modalities")
    if hidden := [modality for modality in asked if modality not in _SENDABLE]:
        raise BadOptionError(f"'{hidden[0]}' cannot be sent in an answer.", "modalities")
    if extra := [modality for modality in asked if modality not in ANSWERS and Modality.TEXT not in asked]:
        raise BadOptionError(f"'{extra[0]}' can only accompany 'text': ask for both.", "modalities")
    return asked


def _outputs(given: Any, modalities: Collection[Modality], pipeline: Pipeline) -> frozenset[str]:
    """The stages whose outputs come in `omni`: those named, and final ones that the route has no field for."""
    param = "omni.outputs"
    names = _names(given, param) if given is not None else ()
    running = {stage.name: stage for stage in pipeline.needed_for(modalities)}
    _require_known(names, running, _NOT_RUN, param)
    for name in names:
        if (output := running[name].output) not in _SENDABLE:
            raise BadOptionError(f"Stage '{name}' has the output '{output}', which cannot be sent.", param)
    extra = (name for name, stage in running.items() if stage.final and stage.output in modalities)
    return frozenset(names) | {name for name in extra if running[name].output not in ANSWERS}


def _sampling(given: Any, modalities: Collection[Modality], pipeline: Pipeline) -> dict[str, Mapping[str, Any]]:
    """The sampling parameters given by stage; refused for stages that sample nothing or use the request's own."""
    param = "omni.sampling"
    sampling = {name: _mapping(value, f"{param}.{name}") for name, value in _mapping(given, param).items()}
    running = {stage.name: stage for stage in pipeline.needed_for(modalities)}
    _require_known(sampling, running, _NOT_RUN, param)
    clients = pipeline.sampled_by_client(modalities)
    for name, values in sampling.items():
        if running[name].output is Modality.KV_CACHE:
            raise BadOptionError(f"Stage '{name}' only fills a KV cache and samples nothing.", f"{param}.{name}")
        extra = _mapping(values.get("extra_args"), f"{param}.{name}.extra_args")
        if transfers := sorted(TRANSFER_PARAMS.intersection(extra)):
            raise BadOptionError(f"`{transfers[0]}` are set by the pipeline.", f"{param}.{name}")
    if clients is not None and clients.name in sampling:
        own = "uses the request's own sampling parameters: set them there"
        raise BadOptionError(f"Stage '{clients.name}' {own}.", f"{param}.{clients.name}")
    return sampling


def _format(audio: Mapping[str, Any]) -> str:
    given = _text(audio.get("format", ""), "audio.format")
    if given:
        _require_known((given,), AUDIO_FORMATS, "there is no format {}", "audio.format")
    return given


def _require_known(names: Iterable[str], known: Iterable[str], problem: str, param: str) -> None:
    known = list(map(str, known))
    for name in names:
        if name not in known:
            fault = problem.format(f"'{name}'") + did_you_mean(name, known)
            raise BadOptionError(f"`{param}`: {fault}: use one of {', '.join(known)}.", param)


def _names(given: Any, param: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise BadOptionError(f"`{param}` must be a list of names.", param)
    return tuple(given)


def _mapping(given: Any, param: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadOptionError(f"`{param}` must be an object.", param)
    return given


def _text(given: Any, param: str) -> str:
    if not isinstance(given, str):
        raise BadOptionError(f"`{param}` must be a string.", param)
    return given
