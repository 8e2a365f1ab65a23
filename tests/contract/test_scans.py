"""The scans themselves, on code whose answers are known."""

from pathlib import Path

import pytest

from .resolution import BrokenSymbolError, Symbol, check, read_symbols
from .usage import vllm_names


def test_a_list_of_symbols_is_read() -> None:
    text = "# About it.\n\n[what x is]\na.B: c, d(e,\n    *, f)\na: G()\n"
    use = "what x is"
    assert list(read_symbols(text)) == [
        Symbol("a.B.c", use),
        Symbol("a.B.d", use, ("e",), ("f",)),
        Symbol("a.G", use, ()),
    ]


def test_a_symbol_may_be_one_of_some_versions() -> None:
    old, new = read_symbols("[x]\nbefore 0.33 a: b\nsince 0.33 c: b\n")
    assert [symbol.is_of(release) for symbol in (old, new) for release in ((0, 32), (0, 33))] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("symbol", "complaint"),
    [
        pytest.param(Symbol("json.gone", "x"), "no attribute 'gone'", id="function gone"),
        pytest.param(Symbol("nowhere.at.all", "x"), "No module named 'nowhere'", id="package gone"),
        pytest.param(Symbol("json.JSONEncoder.gone", "x"), "JSONEncoder has no attribute 'gone'", id="attribute gone"),
        pytest.param(Symbol("json.JSONEncoder.encode", "x", ("obj",)), r"takes \['o'\]", id="parameter renamed"),
        pytest.param(Symbol("json.dumps", "x", ("obj", "indent")), "by position", id="no longer positional"),
        pytest.param(Symbol("bisect.insort", "x", ("a",)), "missing a required argument", id="new required parameter"),
        pytest.param(Symbol("bisect.insort", "x", ("a", "x"), ("y",)), "unexpected keyword", id="keyword gone"),
    ],
)
def test_a_broken_symbol_is_named_with_its_fault_and_its_use(symbol: Symbol, complaint: str) -> None:
    with pytest.raises(BrokenSymbolError, match=complaint) as caught:
        check(symbol)
    assert str(caught.value).startswith(f"{symbol.path}: ")
    assert str(caught.value).endswith("(used for: x)")


def test_a_module_that_needs_what_is_not_installed_is_no_missing_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "owner_of_a_hungry_module").mkdir()
    (folder / "__init__.py").touch()
    (folder / "hungry.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenSymbolError, match="No module named 'not_installed_anywhere'"):
        check(Symbol("owner_of_a_hungry_module.hungry.food", "x"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from vllm.a import B as C\nC.d", {"vllm.a.B", "vllm.a.B.d"}),
        ("def f():\n    from vllm import envs\n    envs.X", {"vllm.envs", "vllm.envs.X"}),
        ("from vllm_other import B\nB.c", set()),
        ("from .vllm import B", set()),
        ("from vllm.a import B\npatch_function(B, 'c', f)", {"vllm.a.B", "vllm.a.B.c"}),
    ],
)
def test_names_taken_from_vllm_are_found(source: str, expected: set[str]) -> None:
    assert vllm_names(source) == expected
