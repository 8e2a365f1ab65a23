"""Files that cannot be read or are not usable YAML give an error of one line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.pipeline import load_pipeline

from .files import DIAMOND, SINGLE, SPEECH, complaint, tail


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pipeline.yaml: the file is empty"),
        ("# nothing\n", "pipeline.yaml: the file is empty"),
        ("stages:\n  a: b: c\n", "pipeline.yaml:2: invalid YAML: mapping values are not allowed here"),
        ("stages: [", "pipeline.yaml:1: invalid YAML: expected the node content, but found '<stream end>'"),
        ("a: 1\n---\nb: 1\n", "pipeline.yaml:2: invalid YAML: but found another document"),
        ("a: 1\nb: \0\n", "pipeline.yaml:2: invalid YAML: the character U+0000 is not allowed"),
        ("a: *b\n", "pipeline.yaml:1: invalid YAML: found undefined alias 'b'"),
        pytest.param("[" * 1000, "pipeline.yaml: nested too deeply", id="nested"),
        ("stages: &a\n  - *a\n", "pipeline.yaml: an alias that contains itself"),
        (
            "a: &a [0,0,0,0,0,0,0,0,0]\n"
            + "".join(f"{b}: &{b} [{','.join(9 * [f'*{a}'])}]\n" for a, b in zip("abcde", "bcdef", strict=True)),
            "pipeline.yaml: more than 50,000 values after aliases are expanded",
        ),
        (
            "a: &a {x: [1]}\n"
            + "".join(
                f"{b}: &{b} {{<<: [{','.join(9 * [f'*{a}'])}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "pipeline.yaml:1: a: unknown key: use stages",
        ),
        ("stages:\n  - id: 0\n    name: a\n    id: 1\n", "pipeline.yaml:4: invalid YAML: the key 'id' occurs twice"),
        ("stages:\n  - no: a\n", "pipeline.yaml:2: invalid YAML: the key 'no' is not text: quote it"),
        ("a: 1\n? !!str [b]\n: 1\n", "pipeline.yaml:2: invalid YAML: a list or mapping cannot be a key"),
        ("a: !!seq b\n", "pipeline.yaml:1: invalid YAML: expected a sequence node, but found scalar"),
        (
            "a: 1\n<<: 1\n",
            "pipeline.yaml:2: invalid YAML: expected a mapping or list of mappings for merging, but found scalar",
        ),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "pipeline.yaml:1: invalid YAML: a value of type 'python/object/apply:os.system' cannot be used: "
            "quote it if it is text",
        ),
        (
            f"{SINGLE}    sampling:\n      day: 2026-01-31\n",
            "pipeline.yaml:9: invalid YAML: a value of type 'timestamp' cannot be used: quote it if it is text",
        ),
        ("a: !!int x\n", "pipeline.yaml:1: invalid YAML: 'x' is not a value of type 'int'"),
        ("a: !!bool x\n", "pipeline.yaml:1: invalid YAML: 'x' is not a value of type 'bool'"),
    ],
    ids=tail,
)
def test_invalid_yaml_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert complaint(file) == message


@given(st.data())
def test_any_file_loads_or_gives_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = data.draw(st.sampled_from([SPEECH, DIAMOND])).read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 20)))
    splinters = b"- |: |{|[|*small|&a |<<: |!!int |\n|\n    |'|null|? ".split(b"|")
    inserted = data.draw(st.lists(st.sampled_from(splinters), max_size=3).map(b"".join) | st.binary(max_size=3))
    file = tmp_path_factory.getbasetemp() / "changed.yaml"
    file.write_bytes(content[:start] + inserted + content[end:])
    error = f"{file}: nothing"
    try:
        load_pipeline(file)
    except ConfigError as raised:
        error = str(raised)
    assert error.startswith(f"{file}:")
    assert "\n" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"stages:\n- name: caf\xe9\n", "pipeline.yaml:2: not UTF-8: byte 0xe9"),
        pytest.param(
            SINGLE.encode() + b"#" * (1024 * 1024 + 1 - len(SINGLE)), "pipeline.yaml: larger than 1 MiB", id="too large"
        ),
        (None, "pipeline.yaml: cannot be read: No such file or directory"),
    ],
    ids=tail,
)
def test_a_file_that_cannot_be_used_is_refused(file: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        file.write_bytes(content)
    assert complaint(file) == message
