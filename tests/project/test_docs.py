"""The docs: what they name, quote and link to exists, and what scripts write of the code is current."""

import ast
import re

from tools import flags_page, metrics_page
from tools.wire_page import LISTS, PAGE, page
from vllm_omni_plugin.config import FLAGS

from .source_tree import ROOT, modules, python_files, relative, text_files

DOCUMENTS = [path for path in text_files() if path.suffix == ".md"]
FOR_DEVELOPERS = [path for path in DOCUMENTS if path.stem in {"architecture", "map", "wire", "CONTRIBUTING"}]
_PATH = re.compile(r"[\w./-]+(\.py|/)")
_NAME = re.compile(r"_?[A-Z]\w*[a-z]\w*[A-Z]\w*|[a-z]+_\w+")
# Not what kubectl or a folder of their own has under such a name.
_FILE = re.compile(
    r"(?<![\w/.$}-])(?<!kubectl exec )"
    r"((?:benchmarks|deploy|docs|entrypoints|examples|tests|tools|vllm_omni_plugin)/[\w./-]*\w)(?:#([\w-]+))?"
)
_LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")


def _prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_name_of_code_exists() -> None:
    files = [*python_files(), *(path for path in text_files() if path.name == "symbols.txt")]
    words = {word for path in files for word in [path.stem, *re.findall(r"\w+", path.read_text())]}
    paths = [relative(path) for path in text_files()]
    missing = []
    for document in FOR_DEVELOPERS:
        for quoted in re.findall(r"`([^`\n]+)`", _prose(document.read_text())):
            if _PATH.fullmatch(quoted):
                known = any(quoted.removeprefix("./") in path for path in paths)
            else:
                parts = quoted.removesuffix("()").split(".")
                known = all(part in words for part in parts if _NAME.fullmatch(part))
            if not known:
                missing.append(f"{relative(document)}: {quoted}")
    assert missing == []


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for target, anchor in _LINK.findall(_prose(document.read_text())):
            path = document.parent / target if target else document
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path.read_text())):
                broken.append(f"{relative(document)}: {target}#{anchor}")
    assert broken == []


def test_every_file_that_a_chart_a_script_a_comment_or_a_message_names_exists() -> None:
    broken = []
    for path in text_files():
        for named, anchor in _FILE.findall(path.read_text()):
            # The rest of the name may be a variable. The site's navigation begins at docs/.
            found = [file for folder in (ROOT, path.parent, ROOT / "docs") for file in folder.glob(f"{named}*")]
            is_known = bool(found) and (not anchor or anchor in _anchors(found[0].read_text()))
            if not is_known and not re.search(r"\bNAME\b", named):
                broken.append(f"{relative(path)}: {named}#{anchor}")
    assert broken == []


QUOTED = re.findall(r"^> `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
_GAP = "\0"


def texts(source: str) -> set[str]:
    """All texts in a module's code, with a gap for each value that is formatted into them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(re.sub(r"%(\(\w+\))?(\.\d)?[sdrf]", _GAP, node.value))
    return found


def is_said(message: str, said: set[str]) -> bool:
    """Whether a text of the code gives this message, or one that contains it."""
    parts = [re.escape(part) for part in message.split("...")]
    pattern = re.compile(f".*{_GAP}.*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in said)


def test_every_message_is_one_of_the_code() -> None:
    said = set().union(*(texts(module.path.read_text()) for module in modules().values()))
    assert len(QUOTED) > 25
    assert [message for message in QUOTED if not is_said(message, said)] == []


SAME_IN_ALL_VERSIONS = {"SessionRefused": "refused", "AttachRefused": "refused"}


def test_the_lists_of_messages_are_made_from_their_structs() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tools.wire_page"


def test_a_message_has_the_name_of_its_class_on_the_wire() -> None:
    tags = {struct.__name__: struct.__struct_config__.tag for structs in LISTS.values() for struct in structs}
    named = {name: tag for name, tag in tags.items() if tag is not None}
    by_class = {name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in named}
    assert len(named) > 20
    assert named == by_class | SAME_IN_ALL_VERSIONS


_FLAG = re.compile(r"--omni-[a-z-]*[a-z]")
_PATTERN_OF_FLAGS = re.compile(r"--omni-[a-z-]*\*")


def test_a_page_is_what_its_script_writes() -> None:
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python -m tools.flags_page"
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m tools.metrics_page"


def test_pages_name_only_flags_that_exist() -> None:
    known = {flag.name for flag in FLAGS}
    texts = {
        relative(path): _PATTERN_OF_FLAGS.sub("", path.read_text()) for path in text_files() if path.suffix == ".md"
    }
    assert {page: unknown for page, text in texts.items() if (unknown := set(_FLAG.findall(text)) - known)} == {}
