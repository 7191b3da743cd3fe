"""The alert rules: run by promtool over series that should fire them and that should not; what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_lines import find_command, options_of

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs" / "operations" / "compose" / "alerts.yml"
CASES = ROOT / "tests" / "prometheus" / "alerts.test.yml"
# Absolute, so that Alertmanager and what it notifies can link to it.
MAIN = "https://github.com/penstock/penstock/blob/main/"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and not os.environ.get("CI"),
    reason="promtool is not installed; on Debian it comes with the package prometheus",
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def cases() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load(CASES.read_text("utf-8"))["tests"]
    return loaded


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None, "promtool is missing: .ci/run takes it from Debian's package prometheus"
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("check", "config", str(RULES.with_name("prometheus.yml")))


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_is_silent_beside_it(tmp_path: Path) -> None:
    # Side by side, as the cases name the rules without a folder.
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / CASES.name))


@needs_promtool
def test_an_alert_that_does_not_fire_is_found(tmp_path: Path) -> None:
    rule = next(rule for rule in rules() if rule["alert"] == "PenstockDeadLetters")
    never = rule | {"expr": rule["expr"].replace("> 0", "> 1000000")}
    (tmp_path / RULES.name).write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [never]}]}), "utf-8")
    case = next(case for case in cases() if case["name"] == "messages that could not be processed")
    expected = {"expr": 'count(ALERTS{alertname="PenstockDeadLetters", alertstate="firing"})', "eval_time": "20m",
                "exp_samples": [{"labels": "{}", "value": 1}]}  # fmt: skip
    tests = [case | {"promql_expr_test": [expected]}]
    (tmp_path / CASES.name).write_text(yaml.safe_dump({"rule_files": [RULES.name], "tests": tests}), "utf-8")
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", str(tmp_path / CASES.name))


def test_every_alert_has_a_case_in_which_it_fires_and_all_one_in_which_none_does() -> None:
    fired: set[str] = set()
    for case in cases():
        for step in case.get("alert_rule_test", ()):
            if step["exp_alerts"]:
                fired.add(step["alertname"])
        for step in case.get("promql_expr_test", ()):
            for sample in step["exp_samples"]:
                fired |= set(re.findall(r'alertname="(\w+)"', sample["labels"]))
    names = {rule["alert"] for rule in rules()}
    assert fired == names
    well = next(case for case in cases() if case["name"] == "all is well")
    assert well["promql_expr_test"] == [{"expr": "ALERTS", "eval_time": "50m", "exp_samples": []}]
    # That none fires is worth something only where its series are there.
    given = " ".join(series["series"] for series in well["input_series"])
    used = {name for rule in rules() for name in re.findall(r"\b(?:penstock_\w+|up)\b", rule["expr"])}
    assert used - set(re.findall(r"\b(?:penstock_\w+|up)\b", given)) == set()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_what_to_do_and_where_more_is_said(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert len(notes["summary"]) < 120
    assert notes["description"].endswith(".")
    assert notes["runbook_url"].startswith(MAIN)
    page, _, anchor = notes["runbook_url"].removeprefix(MAIN).partition("#")
    assert anchor == rule["alert"].lower()
    assert f"### {rule['alert']}\n" in (ROOT / page).read_text("utf-8")


def test_commands_of_the_alerts_exist() -> None:
    lines = [line for rule in rules() for line in re.findall(r"`penstock ([^`]+)`", rule["annotations"]["description"])]
    assert lines
    for line in lines:
        command, words = find_command(line.split())
        assert {word for word in words if word.startswith("-")} <= options_of(command), line
