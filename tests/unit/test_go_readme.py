"""clients/go/README.md, on machines without Go: tests/acceptance/test_go_kit.py builds the example."""

from __future__ import annotations

import re

from tests.docs_blocks import ROOT, all_blocks

KIT = ROOT / "clients" / "go"


def test_the_example_of_the_readme_is_that_which_is_built() -> None:
    (block,) = [block.text for block in all_blocks() if block.page == "clients/go/README.md"]
    assert "penstock.Handle(" in block
    assert block.strip() in (KIT / "example" / "main.go").read_text("utf-8")


def test_its_settings_are_settings_of_penstock_and_the_readme_has_all() -> None:
    known = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    readme, code = ((KIT / name).read_text("utf-8") for name in ("README.md", "settings.go"))
    for text in (readme, code):
        found = set(re.findall(r"PENSTOCK_[A-Z_0-9]+[A-Z0-9]", text))
        assert found
        assert not [name for name in found if name not in known]
    assert not [name for name in re.findall(r'"((?:PENSTOCK|AWS)_[A-Z_]+)"', code) if name not in readme]


def test_it_needs_no_other_module() -> None:
    assert "require" not in (KIT / "go.mod").read_text("utf-8")
