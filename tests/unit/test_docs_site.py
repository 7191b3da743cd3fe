"""The navigation of the documentation site and llms.txt, against the pages that exist. `make docs` checks the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from docs.site import pages

DOCS = Path(__file__).parents[2] / "docs"


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(entry)


NAV = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"))["nav"]
NAVIGATION = list(entries(NAV))


def test_every_page_is_in_the_navigation_once() -> None:
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(there) > 30
    found = {page: [entry for entry in NAVIGATION if fnmatchcase(page, entry)] for page in there}
    assert {page: places for page, places in found.items() if len(places) != 1} == {}


def test_every_entry_of_the_navigation_has_a_page() -> None:
    assert pages.OUTSIDE["README.md"] == "index.md"
    assert all((DOCS.parent / origin).is_file() for origin in pages.OUTSIDE)
    there = set(pages.OUTSIDE.values())
    assert [entry for entry in NAVIGATION if entry not in there and not list(DOCS.glob(entry))] == []


def test_llms_txt_is_written_from_the_pages_and_its_links_lead_to_them() -> None:
    text = (DOCS.parent / "llms.txt").read_text("utf-8")
    assert text == pages.llms_txt(pages.navigation(NAV), pages.origin_of), "make reference"
    links = re.findall(r"^- \[[^\]]+\]\(([^()]+)\): \S.*\.$", text, re.MULTILINE)
    assert len(links) == text.count("\n- ") > 50
    assert [link for link in links if not (DOCS.parent / link).is_file()] == []


def test_llms_txt_has_the_form_of_the_proposal() -> None:
    """One H1, a quotation, then H2 sections with nothing but lists of links (https://llmstxt.org)."""
    title, about, *sections = pages.llms_txt(pages.navigation(NAV), lambda page: page).rstrip().split("\n\n")
    assert title == "# Penstock"
    assert about.startswith("> Penstock is ")
    assert [one for one in sections[::2] if not one.startswith("## ")] == []
    assert [line for one in sections[1::2] for line in one.split("\n") if not line.startswith("- [")] == []
    named = set(re.findall(r"\]\(([^()]+)\)", "\n".join(sections)))
    assert {page for page in NAVIGATION if "*" not in page} | {"openrpc.json"} == named
