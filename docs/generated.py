"""Pages whose lower part is written from the code: what stands above the mark is written by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

MARK = "<!-- What follows is written by `make reference`. -->\n"


def page(path: Path, reference: Callable[[], str]) -> str:
    """The page with a newly written reference. Raises SystemExit for a page without the mark."""
    head, mark, _ = path.read_text("utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{path} has no line {MARK!r}")
    return head + mark + reference()


def write(path: Path, reference: Callable[[], str]) -> None:
    """Write the page where it is not as it should be, and say so."""
    after = page(path, reference)
    is_new = after != path.read_text("utf-8")
    if is_new:
        path.write_text(after, "utf-8")
    print(f"{path} {'is written' if is_new else 'is as it was'}", file=sys.stderr)


def row(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
