"""The site of docs/, as far as it can be checked without MkDocs: its pages, and where their links lead."""

import posixpath
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tools.docs_site import linked_files, site_path, with_links_of_site

from .source_tree import ROOT, relative, text_files

SITE = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())
NAV = SITE["nav"]
PAGES = {relative(path): path.read_text() for path in text_files() if path.suffix == ".md"}
FOR_DEVELOPERS = {f"docs{name}" for name in SITE["exclude_docs"].split() if name.endswith(".md")}
FOR_USERS = {page for page in PAGES if page.startswith("docs/")} - FOR_DEVELOPERS


def entries(nav: Any) -> Iterator[str]:
    """The pages that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(part)


def test_the_navigation_has_every_page_of_the_folder_once() -> None:
    named = list(entries(NAV))
    assert sorted(set(named)) == sorted(named)
    assert {site_path(page) for page in FOR_USERS} <= set(named)
    assert [page for page in named if not ((ROOT / "docs" / page).is_file() or (ROOT / page).is_file())] == []


def test_no_page_of_the_site_links_to_one_that_only_the_repository_has() -> None:
    assert PAGES.keys() >= FOR_DEVELOPERS
    links = {page: set(re.findall(r"\]\(([^)#:\s]+)", PAGES[page])) for page in FOR_USERS}
    folders = {page: posixpath.dirname(page) for page in FOR_USERS}
    targets = {page: {posixpath.normpath(f"{folders[page]}/{link}") for link in found} for page, found in links.items()}
    assert {page: found for page, linked in targets.items() if (found := linked & FOR_DEVELOPERS)} == {}


def test_links_of_every_page_lead_to_the_same_file_on_the_site() -> None:
    for page, text in PAGES.items():
        changed = with_links_of_site(page, text)
        expected = {site_path(linked) for linked in linked_files(page, text)}
        folder = posixpath.dirname(site_path(page))
        assert all(posixpath.relpath(target, folder or ".") in changed for target in expected)
