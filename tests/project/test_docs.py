"""What the documents for developers name exists, and what they link to."""

import re

from .source_tree import python_files, relative, text_files

DOCUMENTS = [path for path in text_files() if path.suffix == ".md"]
FOR_DEVELOPERS = [path for path in DOCUMENTS if path.stem in {"architecture", "map", "wire", "CONTRIBUTING"}]
_PATH = re.compile(r"[\w./-]+(\.py|/)")
_NAME = re.compile(r"_?[A-Z]\w*[a-z]\w*[A-Z]\w*|[a-z]+_\w+")
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
