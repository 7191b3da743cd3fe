"""docs/moving-from-scheduler0.md against the settings, routes and statements that it tells of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.robfig import MACROS, translate
from penstock.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "moving-from-scheduler0.md").read_text("utf-8")
EXAMPLE = ROOT / "examples" / "scheduler0-node"
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}


def test_every_setting_of_the_api_is_told_and_every_setting_told_exists() -> None:
    named = set(re.findall(r"PENSTOCK_[A-Z0-9_]+", PAGE))
    assert named <= SETTINGS
    missing = {name for name in SETTINGS if name.startswith("PENSTOCK_SCHEDULER0")} - named
    assert missing <= {"PENSTOCK_SCHEDULER0_AUTH_PASSWORD"}  # told with the user's, by its end


@pytest.mark.parametrize("page", ["docs/moving-from-scheduler0.md", "docs/schedules.md"])
def test_expressions_of_the_dialect_can_be_read(page: str) -> None:
    found = re.findall(r"@robfig ([^`\"@]+)[`\"]", (ROOT / page).read_text("utf-8"))
    assert found
    for spec in found:
        assert len(translate(spec).split()) == 6
    assert "@hourly" in MACROS


def test_the_example_needs_what_its_page_sets() -> None:
    code, page = (EXAMPLE / "index.js").read_text("utf-8"), (EXAMPLE / "README.md").read_text("utf-8")
    variables = set(re.findall(r"process\.env\.([A-Z_]+)", code))
    assert variables == {"API_ENDPOINT", "API_KEY", "API_SECRET", "JOBS", "MINUTES", "PORT"}
    told = set(re.findall(r"[A-Z][A-Z0-9_]+", page))
    assert variables - {"API_KEY", "API_SECRET"} <= told  # those two are what the command prints
    assert {name for name in told if name.startswith(PREFIX)} <= SETTINGS
