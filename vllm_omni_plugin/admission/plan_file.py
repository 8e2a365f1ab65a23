"""From a YAML file to a plan. Everything that can be wrong with the file is found out here."""

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from vllm_omni_plugin.admission.plan import AdmissionPlan
from vllm_omni_plugin.documents import Document, Place, read, validate
from vllm_omni_plugin.errors import did_you_mean


@cache
def schema() -> Mapping[str, Any]:
    """The JSON Schema (2020-12) of the file."""
    text = files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    return MappingProxyType(json.loads(text))


def load_admission(path: str | os.PathLike[str]) -> AdmissionPlan:
    """Read and check a file, which `schema.json` and docs/admission.md describe.

    Raises:
        ConfigError: one line that names the file, and where there is one the line and the key.
    """
    document = read(Path(path))
    validate(document, schema())
    _check_classes(document)
    # JSON Schema counts 1.0 among the integers.
    return msgspec.convert(document.data, AdmissionPlan, strict=False)


def _check_classes(document: Document) -> None:
    """Check that classes have names of their own, and that tenants' classes exist."""
    data = document.data
    names: list[str] = []
    for index, each in enumerate(data.get("classes", [{"name": each.name} for each in AdmissionPlan().classes])):
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
