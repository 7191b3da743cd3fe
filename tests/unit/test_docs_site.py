"""The navigation of the documentation site, against the pages that there are. `make docs` checks the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(entry)


NAVIGATION = list(entries(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"))["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(pages) > 30
    found = {page: [entry for entry in NAVIGATION if fnmatchcase(page, entry)] for page in pages}
    assert {page: places for page, places in found.items() if len(places) != 1} == {}


def test_every_entry_of_the_navigation_has_a_page() -> None:
    outside = re.findall(r'"([\w/-]+\.md)": "([\w-]+\.md)"', (DOCS / "site" / "hooks.py").read_text("utf-8"))
    assert ("README.md", "index.md") in outside
    assert all((DOCS.parent / origin).is_file() for origin, _ in outside)
    there = {page for _, page in outside}
    assert [entry for entry in NAVIGATION if entry not in there and not list(DOCS.glob(entry))] == []
