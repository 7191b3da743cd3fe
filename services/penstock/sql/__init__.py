"""The named statements: every transition and every look of Penstock at Postgres stands in the .sql files beside this.

A statement begins with ``-- name: verb_noun``; the comment lines after it tell its parameters and the reason for
its shape. ``SQL["claim_tasks"]`` is its text. A block that begins with ``-- part: name`` is none by itself; it stands
wherever statements of its file say ``{name}``, those of ``_parts.sql`` in every file.
"""

from __future__ import annotations

import re
from importlib.resources import files

_BLOCK = re.compile(r"^-- (name|part): (.*?)(?=^-- (?:name|part): |\Z)", re.MULTILINE | re.DOTALL)


def _load() -> dict[str, str]:
    statements: dict[str, str] = {}
    shared: dict[str, str] = {}
    for path in sorted(files(__package__).iterdir(), key=lambda entry: entry.name):
        if not path.name.endswith(".sql"):
            continue
        parts: dict[str, str] = {}
        for kind, block in _BLOCK.findall(path.read_text("utf-8")):
            name, _, text = block.partition("\n")
            if name in statements or name in parts:
                raise ValueError(f"two statements are named {name!r}; the second is in {path.name}")
            text = text.strip().removesuffix(";")
            if kind == "part":
                parts[name] = text
                continue
            for part, inserted in [*parts.items(), *shared.items()]:
                text = text.replace(f"{{{part}}}", inserted)
            statements[name] = text
        if path.name == "_parts.sql":  # the first in the order of names
            shared = parts
    return statements


SQL = _load()
