"""docs/testing.md is run: its shop, and the tests of it, by a pytest that has the plugin and asyncio alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
PLUGINS = ("-p", "penstock.testing.plugin", "-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto")


def run_pytest(folder: Path) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGINS],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": "."},
    ).stdout  # fmt: skip


def test_every_test_of_the_testing_page_passes(tmp_path: Path) -> None:
    files = re.findall(r"^```python (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["shop.py", "test_shop.py", "test_transaction.py"]
    for name, text in files:
        (tmp_path / name).write_text(text, "utf-8")
    printed = run_pytest(tmp_path)
    assert re.search(r"\b6 passed", printed), printed
    # A shop that forgets what it charged is found out.
    (tmp_path / "test_transaction.py").unlink()
    (tmp_path / "shop.py").write_text(files[0][1].replace("if order not in charged:", "if True:"), "utf-8")
    printed = run_pytest(tmp_path)
    assert "test_a_worker_that_dies_charges_no_card_twice" in printed, printed
    assert re.search(r"\b1 failed, 3 passed", printed), printed


def test_pytest_finds_the_plugin_in_the_installed_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"penstock": "penstock.testing.plugin"}


def test_the_plugin_loads_next_to_nothing_before_a_test_asks_for_a_fixture() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import penstock.testing.plugin;"
        "print(*sorted(n for n in set(sys.modules) - before if not n.startswith('penstock')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= set(sys.stdlib_module_names)
