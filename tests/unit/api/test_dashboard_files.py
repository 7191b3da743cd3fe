"""What of the dashboard ships: every file in the wheel, each one in use, nothing fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import jinja2
import pytest

from penstock.api.dashboard.pages import PAGES
from penstock.api.dashboard.routes import _load_assets, _templates

FOLDER = files("penstock.api.dashboard")
TEMPLATES = sorted(path.name for path in FOLDER.joinpath("templates").iterdir())
ASSETS = sorted(path.name for path in FOLDER.joinpath("assets").iterdir())
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_can_be_read_and_holds_no_script_style_or_handler(name: str) -> None:
    _templates().get_template(name)
    text = FOLDER.joinpath("templates", name).read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|\|\s*safe\b|https?://", text)
    jinja2.Environment().parse(text)


def test_every_template_belongs_to_a_page_or_to_what_is_shown_in_its_place() -> None:
    code = "".join(path.read_text("utf-8") for path in FOLDER.iterdir() if path.name.endswith(".py"))
    assert {page.template for page in PAGES} <= set(TEMPLATES)
    assert [name for name in TEMPLATES if f'"{name}"' not in code and name != "base.html"] == []


def test_assets_fetch_nothing_from_elsewhere() -> None:
    assert {"app.js", "style.css", "icon.svg"} <= set(ASSETS) == set(_load_assets())
    for name in ASSETS:
        text = FOLDER.joinpath("assets", name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\((?!#)", text), name


def test_pictures_that_the_documents_show_are_there_and_small() -> None:
    for page in ("README.md", "docs/dashboard.md"):
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / page).read_text("utf-8"))
        assert shown, page
        for target in shown:
            picture = (ROOT / page).parent / target
            assert picture.read_bytes().startswith(b"\x89PNG"), target
            assert picture.stat().st_size < 400_000, target


def test_the_wheel_holds_templates_and_assets(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the builder of the wheel is not installed")
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, held in (("templates", TEMPLATES), ("assets", ASSETS)):
        assert {f"penstock/api/dashboard/{folder}/{name}" for name in held} <= names
