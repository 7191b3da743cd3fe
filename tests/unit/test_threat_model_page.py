"""docs/threat-model.md and SECURITY.md against what they speak of: tests, settings, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from penstock.settings.model import Settings
from penstock.settings.values import PREFIX

ROOT = Path(__file__).parents[2]
PAGES = {path: (ROOT / path).read_text("utf-8") for path in ("docs/threat-model.md", "SECURITY.md")}
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGES["docs/threat-model.md"])))


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_defence_names_a_test_that_holds_it() -> None:
    section = PAGES["docs/threat-model.md"].split("## What is defended\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"PENSTOCK_[A-Z_]+", PAGES[page]))
    assert named
    assert named <= {PREFIX + name.upper() for name in Settings.model_fields}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert ((ROOT / page).parent / target).exists(), target
