"""The check of wording, .ci/words.py: phrases planted in each kind of text, and code that it must leave alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", ROOT / ".ci" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLANTED = {
    "docs/page.md": "# Title\n\nIt runs at the\nmost twice, and then anew.\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\nAt the\nmost two run\nanew.\n\n## [1.0.0]\n\nIt starts anew.\n",
    "templates/page.html": (
        "<p>\n{{ ui.pair('Left', 'at the most') }}\n <b title=\"Start it anew\">go</b>\n"
        "at the {{ x }} most <i>doors</i></p>\n"
    ),
    "module.py": (
        '"""The first line.\n\nA docstring: at the most two."""\n'
        "# A comment: it starts\n# anew.\n"
        'HELP = Option(help="Runs at the "\n "most twice.")\n'
        'raise ValueError(f"{count} tasks: start {each} anew")\n'
    ),
    "alerts.yml": 'groups:\n  - expr: rate(x{door="http"}[5m])\n    summary: it starts anew\n    help: "at the most"\n',
    "statements.sql": "-- part: one\n-- At the most one row\n-- is read anew.\nselect 1;\n",
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("docs/page.md", [(3, "at the most"), (4, "anew")]),
        ("CHANGELOG.md", [(5, "At the most"), (7, "anew")]),
        ("templates/page.html", [(2, "at the most"), (3, "anew"), (4, "doors")]),
        ("module.py", [(3, "at the most"), (5, "anew"), (6, "at the most"), (8, "anew")]),
        ("alerts.yml", [(3, "anew"), (4, "at the most")]),
        ("statements.sql", [(2, "At the most"), (3, "anew")]),
    ],
)
def test_a_planted_phrase_is_found_on_its_line(words: ModuleType, path: str, found: list[tuple[int, str]]) -> None:
    assert [(finding.line, finding.phrase) for finding in words.findings(path, PLANTED[path])] == found


def test_a_finding_says_where_it_stands_and_what_to_write(words: ModuleType) -> None:
    assert [str(finding) for finding in words.findings("docs/page.md", "It starts anew.\n")] == [
        'docs/page.md:1: "anew": write "again"'
    ]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (
            "page.md",
            "Run\n\n```\npenstock anew --door x\n```\n\n~~~\nanew\n~~~\n\n- so:\n\n  ```python\n  anew()\n  ```\n",
        ),
        ("page.md", "The column `armed` and the label ``door`` of [this page](anew.md) and `spread\nanew`.\n"),
        ("page.md", "The table penstock.armed, a `door` and mendacity.\n"),
        ("CHANGELOG.md", "# Changelog\n\n## [1.0.0]\n\nIt starts anew.\n"),
        ("page.html", '<p class="door deed">{{ ui.deed(me, "retry") }}{% if door %}x{% endif %}</p>'),
        ("module.py", "anew = door(armed)['deed']\nLABEL = 'door'\n# The label `door` names it.\n"),
        ("alerts.yml", 'rules:\n  - expr: |\n      sum by (door) (\n        x{door="http"})\n    summary: fine\n'),
    ],
)
def test_code_is_left_alone(words: ModuleType, path: str, content: str) -> None:
    assert words.findings(path, content) == []


def test_every_phrase_is_found_by_its_own_words(words: ModuleType) -> None:
    for said in ("anew", "it is away", "what became of it", "doors", "let\ngo", "reckoned", "as it is, and", "nobody"):
        assert words.findings("page.md", f"So {said} here.\n"), said


def test_make_check_asks(words: ModuleType) -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").split("\ncheck:")[1].split("\n\n")[0]
    assert "python .ci/words.py" in recipe
