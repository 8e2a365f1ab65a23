"""The admission file: classes of requests, bounds of the wait queue, weights and limits of tenants."""

import json
import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from vllm_omni_plugin.documents import Document, Place, read, validate
from vllm_omni_plugin.errors import did_you_mean


class QueueBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait, at all heads together; None: no bound.

    `max_waiting_tokens` are of prompts. `max_wait` is in seconds until the last one would start, at the rate at which
    this head's queue moves.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_wait: float | None = None

    @property
    def any_set(self) -> bool:
        return (self.max_waiting_requests, self.max_waiting_tokens, self.max_wait) != (None, None, None)


class RequestClass(QueueBounds, frozen=True, kw_only=True):
    """Requests that start before those of all later classes. The bounds apply to this class alone.

    Without a class of its tenant, a request is in the first one whose `priority_at_most` is its OpenAI priority or
    more, or None. `deadline`: seconds to the first token, unless the client waits for less.
    """

    name: str
    priority_at_most: int | None = None
    deadline: float | None = None


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, rename={"class_name": "class"}):
    """Share and limits of one tenant.

    `weight` is relative to those of the other tenants that wait in a class. Without `class_name`, priorities choose the
    class. `max_in_flight` counts waiting requests, too, and `tokens_per_s` prompts and answers. `burst_tokens` can be
    saved up while idle, by default those of 10 seconds.
    """

    weight: float = 1.0
    class_name: str | None = None
    max_in_flight: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int | None = None


class AdmissionConfig(QueueBounds, frozen=True, kw_only=True):
    """A whole admission file. Its own bounds apply to all classes together; the first class starts first.

    `default_tenant` is for tenants that are not in `tenants`, and for requests without a tenant.
    """

    classes: tuple[RequestClass, ...] = (RequestClass(name="default"),)
    tenants: Mapping[str, TenantSettings] = {}
    default_tenant: TenantSettings = TenantSettings()

    @property
    def can_refuse(self) -> bool:
        """Whether any bound, deadline or limit is set."""
        tenants = (self.default_tenant, *self.tenants.values())
        return (
            self.any_set
            or any(each.any_set or each.deadline is not None for each in self.classes)
            or any((each.max_in_flight, each.tokens_per_s) != (None, None) for each in tenants)
        )

    def class_index(self, settings: TenantSettings, priority: int | None) -> int:
        """The index of a request's class: the tenant's, else the first that takes the priority, else the last.

        If the priority is unknown (None), the first class that any priority could have.
        """
        for index, each in enumerate(self.classes):
            if settings.class_name is not None:
                if each.name == settings.class_name:
                    return index
            elif priority is None or each.priority_at_most is None or priority <= each.priority_at_most:
                return index
        return len(self.classes) - 1


def schema() -> Any:
    """The JSON Schema (2020-12) of the file."""
    return json.loads(files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))


def load_admission(path: str | os.PathLike[str]) -> AdmissionConfig:
    """Read an admission file, see `schema.json` and docs/admission.md. ConfigError names file, line and key."""
    document = read(Path(path))
    validate(document, schema())
    _check_classes(document)
    # JSON Schema counts 1.0 among the integers.
    return msgspec.convert(document.data, AdmissionConfig, strict=False)


def _check_classes(document: Document) -> None:
    """Check that class names are unique, and that the classes of tenants exist."""
    data = document.data
    names: list[str] = []
    for index, each in enumerate(data.get("classes", [{"name": each.name} for each in AdmissionConfig().classes])):
        if each["name"] in names:
            raise document.error(f"there is a class {each['name']!r} already", ("classes", index, "name"))
        names.append(each["name"])
    places: list[tuple[Place, Mapping[str, Any]]] = [(("default_tenant",), data.get("default_tenant", {}))]
    places += [(("tenants", name), each) for name, each in data.get("tenants", {}).items()]
    for place, settings in places:
        name = settings.get("class", names[0])
        if name not in names:
            message = f"there is no class {name!r}{did_you_mean(name, names)}: use one of {', '.join(names)}"
            raise document.error(message, (*place, "class"))


def config_changes(old: AdmissionConfig, new: AdmissionConfig) -> list[str]:
    """The changed values, one line each: `classes.batch.max_wait: 60 -> 30`."""
    before, after = (dict(_flatten("", msgspec.to_builtins(config))) for config in (old, new))
    return [
        f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        # Classes: named by their names, and their order matters.
        value = {each["name"]: {"place": place} | each for place, each in enumerate(value, 1)}
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flatten(f"{name}.{key}" if name else key, each)
    elif value is not None:
        yield name, value
