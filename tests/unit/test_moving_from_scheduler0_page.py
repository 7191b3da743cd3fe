"""docs/moving-from-scheduler0.md against the settings, routes and statements that it describes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.local.service import HOST
from penstock.schedules.robfig import MACROS, translate
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from tests.command_lines import find_command
from tests.docs_blocks import all_blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "moving-from-scheduler0.md").read_text("utf-8")
EXAMPLE = ROOT / "examples" / "scheduler0-node"
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}


def test_every_setting_of_the_api_is_told_and_every_setting_told_exists() -> None:
    named = set(re.findall(r"PENSTOCK_[A-Z0-9_]+", PAGE))
    assert named <= SETTINGS
    missing = {name for name in SETTINGS if name.startswith("PENSTOCK_SCHEDULER0")} - named
    assert missing <= {"PENSTOCK_SCHEDULER0_AUTH_PASSWORD"}  # described with the user's


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


def test_the_example_can_be_installed_and_started_as_its_page_says() -> None:
    (block,) = (block.text for block in all_blocks() if block.info == "sh npm")
    lines = block.splitlines()
    assert lines[1:] == [f"cd {EXAMPLE.relative_to(ROOT)}", "npm install", "npm start"]
    variables = dict(word.split("=", 1) for word in shlex.split(lines[0])[1:] if "=" in word)
    (called,) = re.findall(r"\$\(penstock ([\w ]+)\)", lines[0])
    command, left = find_command(called.split())
    assert (command.name, left) == ("create", [])
    assert variables == {"API_ENDPOINT": f"http://{HOST}:{Settings.model_fields['http_port'].default}"}
    package = json.loads((EXAMPLE / "package.json").read_text("utf-8"))
    code = (EXAMPLE / package["main"]).read_text("utf-8")
    assert package["scripts"]["start"] == f"node {package['main']}"
    assert set(re.findall(r"require\('([^']+)'\)", code)) == package["dependencies"].keys()
