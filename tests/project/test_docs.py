"""What the documents for developers name exists, and what they link to."""

import re

from .source_tree import ROOT, python_files, relative, text_files

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
