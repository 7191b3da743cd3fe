"""docs/comparison.md, and what of docs/tutorial.md is not run, against what they speak of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hcl2

ROOT = Path(__file__).parents[2]
COMPARISON = (ROOT / "docs" / "comparison.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
_MEASURED = {
    "Penstock, 2 workers": "penstock 2 workers",
    "PgQueuer 1.6, 2 processes, 20,000 tasks": "pgqueuer 2 processes, 20,000 tasks",
    "PgQueuer 1.6, 2 processes, 200,000 tasks": "pgqueuer 2 processes",
    "Awa 0.6, 2 processes": "awa 2 processes",
    "Celery 5.7 on SQS, results in Postgres": "celery SQS, prefork 2",
}


def test_the_rates_are_those_that_were_measured() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text("utf-8"))
    (table,) = re.findall(r"^\| drain of no-op tasks .*?\n\n", COMPARISON, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \|$", table, re.MULTILINE))
    assert rows.keys() == _MEASURED.keys()
    for name, shown in rows.items():
        assert int(shown.replace(",", "")) == report["tasks_per_second"][_MEASURED[name]]["median"], name


def test_everything_that_is_compared_says_where_it_is_better() -> None:
    compared = re.split(r"^## ", COMPARISON, flags=re.MULTILINE)[3:-1]
    assert [
        part.partition("\n")[0] for part in compared if not re.search(r"^\*\*Where .+ better:\*\*", part, re.M)
    ] == []


def blocks(language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL))


def test_the_terraform_of_the_tutorial_is_that_of_the_module() -> None:
    (call,) = hcl2.loads(blocks("hcl"))["module"]
    given = {name for arguments in call.values() for name in arguments if not name.startswith("__")} - {"source"}
    module = "".join(path.read_text("utf-8") for path in (ROOT / "terraform").glob("*.tf"))
    assert given
    assert given <= set(re.findall(r'^variable "(\w+)"', module, re.MULTILINE))
    assert set(re.findall(r"module\.penstock\.(\w+)", TUTORIAL)) <= set(
        re.findall(r'^output "(\w+)"', module, re.MULTILINE)
    )


def test_the_alarms_of_the_tutorial_are_shipped() -> None:
    alerts = (ROOT / "docs" / "operations" / "compose" / "alerts.yml").read_text("utf-8")
    named = set(re.findall(r"^\| (Penstock\w+) \|", TUTORIAL, re.MULTILINE))
    assert len(named) == 5
    assert named <= set(re.findall(r"alert: (\w+)", alerts))
