"""The site of docs/, as far as it can be checked without MkDocs: its pages, and where their links lead."""

import posixpath
from collections.abc import Iterator
from typing import Any

import yaml

from tools.docs_site import linked_files, site_path, with_links_of_site

from .source_tree import ROOT, relative, text_files

NAV = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
PAGES = {relative(path): path.read_text() for path in text_files() if path.suffix == ".md"}


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
    assert {site_path(page) for page in PAGES if page.startswith("docs/")} <= set(named)


def test_the_navigation_names_pages_that_the_site_has() -> None:
    reached = {page for page in PAGES if page.startswith("docs/")}
    new = reached
    while new:
        new = {linked for page in new for linked in linked_files(page, PAGES.get(page, ""))} - reached
        reached |= new
    assert set(entries(NAV)) - {site_path(page) for page in reached} == set()


def test_links_of_every_page_lead_to_the_same_file_on_the_site() -> None:
    for page, text in PAGES.items():
        changed = with_links_of_site(page, text)
        expected = {site_path(linked) for linked in linked_files(page, text)}
        folder = posixpath.dirname(site_path(page))
        assert all(posixpath.relpath(target, folder or ".") in changed for target in expected)
