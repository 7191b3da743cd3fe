"""Commands, settings and figures of the guides for users, and how far the answers are from the first page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import hcl2
import pytest

from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from tests.command_lines import find_command, options_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("costs", "deployment-checklist", "faq", "local-development", "security-on-aws")
TEXTS = {page: (DOCS / f"{page}.md").read_text("utf-8") for page in PAGES}
COMMANDS = sorted(
    {(page, line) for page, text in TEXTS.items() for line in re.findall(r"(?:`|^)penstock ([a-z][^`\n]*)", text, re.M)}
)
_COSTS = TEXTS["costs"]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_a_guide_exists_with_its_options(page: str, line: str) -> None:
    command, words = find_command(shlex.split(line))
    assert {word for word in words if word.startswith("-")} <= options_of(command), page


@pytest.mark.parametrize("page", PAGES)
def test_settings_of_a_guide_exist(page: str) -> None:
    named = {name.lower() for name in re.findall(rf"\b{PREFIX}([A-Z][A-Z_]+)", TEXTS[page])}
    assert named - {"app"} <= set(Settings.model_fields) | {"api_url"}


# Where each question is answered: a page, and a word of the answer there.
ANSWERS = {
    "which queue holds what": ("docs/faq.md", "Which queue holds what"),
    "moving from Celery": ("docs/moving-from-celery.md", "Celery"),
    "what happens when Postgres dies": ("docs/faq.md", "What happens when Postgres is unavailable"),
    "cost at a million tasks a day": ("docs/costs.md", "A million tasks a day"),
    "testing": ("docs/testing.md", "penstock_inline"),
    "scaling": ("docs/autoscaling.md", "slots"),
    "upgrading": ("docs/upgrading.md", "Order of an upgrade"),
    "permissions": ("docs/dashboard.md", "## Permissions"),
    "why a task does not run": ("docs/faq.md", "## A task does not run"),
    "replay": ("docs/faq.md", "## How do I run something again"),
    "use from other languages": ("docs/protocol.md", "outbound queue"),
    "speed against others": ("docs/comparison.md", "tasks a second"),
}


def links_of(page: Path) -> set[Path]:
    text = page.read_text("utf-8")
    return {
        target
        for link in re.findall(r"\]\(([^()\s#]+\.md)(?:#[^()\s]*)?\)", text)
        if (target := (page.parent / link).resolve()).is_file()
    }


@pytest.mark.parametrize("question", ANSWERS)
def test_every_question_is_answered_within_two_clicks_of_the_first_page(question: str) -> None:
    name, words = ANSWERS[question]
    first = links_of(ROOT / "README.md")
    assert (ROOT / name).resolve() in first.union(*map(links_of, first))
    assert words in (ROOT / name).read_text("utf-8")


def test_the_calculator_computes_with_what_was_measured() -> None:
    (rows,) = re.findall(r"MEASURED = \[(.*?)\];", _COSTS)
    measured = [tuple(map(float, row.split(","))) for row in re.findall(r"\[([^\]]+)\]", rows)]
    report = json.loads((ROOT / "benchmarks" / "results" / "trickle.json").read_text("utf-8"))
    figures = report["scenarios"]["trickle"]["figures"]
    for rate, calls, cpu_seconds in measured[:-1]:
        at = figures[f"at_{rate:.0f}_per_second"]
        assert calls == pytest.approx(at["sqs_calls_per_task"], abs=0.05), rate
        assert cpu_seconds * 1000 == pytest.approx(at["cpu_ms"], abs=0.06), rate
    rules = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", _COSTS, re.M))
    for column, name, scale in ((1, "calls to SQS", 1), (2, "CPU without your handlers", 1000)):
        told = [float(number) for number in re.findall(r"\d*\.?\d+", rules[name].split(";")[0].split(":")[0])]
        assert told == pytest.approx([
            measured[0][column] * scale, 50, measured[1][column] * scale, 200, measured[2][column] * scale, 500,
            measured[3][column] * scale,
        ])  # fmt: skip


def test_the_rights_of_each_process_are_those_of_the_module() -> None:
    module = hcl2.loads((ROOT / "terraform" / "iam.tf").read_text("utf-8"))
    access = next(block["access"] for block in module["locals"] if "access" in block)
    told = {
        row[0]: [bool(cell) for cell in row[1:]]
        for line in re.findall(r"^\| (?:\w+) \|.*$", TEXTS["security-on-aws"].split("## Rights in AWS")[1], re.M)
        if (row := [cell.strip() for cell in line.strip("|").split("|")])[0] != "process"
    }
    assert told == {
        process: [verb in verbs for verb in ("Consume", "Send", "Inspect")] for process, verbs in access.items()
    }
