"""The supported versions of vLLM, and the differences between them."""

import pytest

from vllm_omni_plugin.vllm_api.versions import differences, supported
from vllm_omni_plugin.vllm_api.versions.differences import Difference
from vllm_omni_plugin.vllm_api.versions.supported import NEWEST, OLDEST, RANGE, installed_release, why_unsupported

DIFFERENCES = {name: value for name, value in vars(differences).items() if isinstance(value, Difference)}


@pytest.mark.parametrize(
    "version",
    ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1", "0.33.0rc1", "0.33.1.dev7+g1a2b3c4.cu129", "0.33.0.post1", "v0.33.0"],
)
def test_builds_of_the_supported_releases_are_accepted(version: str) -> None:
    assert why_unsupported(version) is None


@pytest.mark.parametrize(
    "version", ["0.31.0", "0.31.1.dev3+g1a2b3c4", "0.34.0", "0.34.0rc0", "1.32.0", "0.3.3", "dev", ""]
)
def test_other_versions_are_refused_with_the_needed_and_the_installed_version(version: str) -> None:
    reason = why_unsupported(version)
    assert reason is not None
    assert RANGE in reason
    assert reason.endswith(version or "one without a version")


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.31.0", OLDEST), ("0.32.4", (0, 32)), ("0.33.0", (0, 33)), ("0.99.0", NEWEST), ("", NEWEST)],
)
def test_a_version_outside_the_range_is_treated_as_its_nearer_end(
    monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int]
) -> None:
    monkeypatch.setattr(supported, "installed_version", lambda: version)
    assert installed_release() == release


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_one_between_supported_versions(name: str) -> None:
    since = DIFFERENCES[name].since
    drop = DIFFERENCES[name].older or "nothing but the entry"
    assert since > OLDEST, f"every supported vLLM has {name}: drop {drop}, and the entry in differences.py"
    assert since <= NEWEST, f"no supported vLLM has {name}"
