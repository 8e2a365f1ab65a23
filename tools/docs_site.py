"""Hook of MkDocs (docs/site/mkdocs.yml): what pages link to outside docs/ becomes part of the site.

So the links that work in a checkout work on the site, too. MkDocs itself is in an environment of its own (`make docs`).
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#:\s]+)(#[\w-]+)?\)")


def site_path(path: str) -> str:
    """Where a file of the repository lies on the site: what is in docs/ at its top, all else as it is."""
    return path.removeprefix("docs/")


def linked_files(page: str, text: str) -> set[str]:
    """The files outside docs/ that a page links to, by their paths in the repository as is the page's own."""
    targets = {_target(page, found[2]) for found in _LINK.finditer(text)}
    return {target for target in targets if not target.startswith("docs/") and (ROOT / target).is_file()}


def with_links_of_site(page: str, text: str) -> str:
    """The text of a page with the links that it has on the site. A folder has no page there: its link is dropped."""

    def changed(link: re.Match[str]) -> str:
        target = _target(page, link[2])
        if (ROOT / target).is_dir():
            return link[1]
        if not (ROOT / target).is_file():
            return link[0]
        path = posixpath.relpath(site_path(target), posixpath.dirname(site_path(page)) or ".")
        return f"[{link[1]}]({path}{link[3] or ''})"

    return _LINK.sub(changed, text)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs has listed docs/: add what its pages link to, and what those pages do."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    pages = [_repository_path(file) for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for linked in sorted(linked_files(page, (ROOT / page).read_text())):
            if files.get_file_from_path(linked) is None:
                files.append(File(linked, str(ROOT), config.site_dir, config.use_directory_urls))
                pages += [linked] if linked.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs has read a page."""
    return with_links_of_site(_repository_path(page.file), markdown)


def _repository_path(file: Any) -> str:
    return Path(file.abs_src_path).resolve().relative_to(ROOT).as_posix()


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
