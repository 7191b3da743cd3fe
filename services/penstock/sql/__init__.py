"""The named statements: every transition and every look of Penstock at Postgres stands in the .sql files beside this.

A statement begins with ``-- name: verb_noun``; the comment lines after it tell its parameters and the reason for
its shape. ``SQL["claim_tasks"]`` is its text.
"""

from __future__ import annotations

from importlib.resources import files


def _load() -> dict[str, str]:
    statements: dict[str, str] = {}
    for path in sorted(files(__package__).iterdir(), key=lambda entry: entry.name):
        if not path.name.endswith(".sql"):
            continue
        for block in path.read_text("utf-8").split("-- name: ")[1:]:
            name, _, text = block.partition("\n")
            if name.strip() in statements:
                raise ValueError(f"two statements are named {name.strip()!r}; the second is in {path.name}")
            statements[name.strip()] = text.strip().removesuffix(";")
    return statements


SQL = _load()
