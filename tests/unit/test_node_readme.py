"""clients/node/README.md, on machines without npm: tests/acceptance/test_node_kit.py compiles its examples."""

from __future__ import annotations

import json
import re

from tests.docs_blocks import ROOT, all_blocks

KIT = ROOT / "clients" / "node"


def test_the_examples_use_what_the_package_exports() -> None:
    exported = set(re.findall(r"\w+", (KIT / "src" / "index.ts").read_text("utf-8")))
    blocks = [block.text for block in all_blocks() if block.page == "clients/node/README.md"]
    assert blocks
    name = json.loads((KIT / "package.json").read_text("utf-8"))["name"]
    for text in blocks:
        (imported,) = re.findall(r'^import \{ (.+) \} from "(.+)";$', text, re.MULTILINE)
        assert imported[1] == name
        assert set(imported[0].split(", ")) <= exported


def test_its_settings_are_settings_of_penstock() -> None:
    known = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    for text in ((KIT / "README.md").read_text("utf-8"), (KIT / "src" / "worker.ts").read_text("utf-8")):
        found = set(re.findall(r"PENSTOCK_[A-Z_0-9]+[A-Z0-9]", text)) - {"PENSTOCK_API_KEY"}
        assert found
        assert not [name for name in found if name not in known]
