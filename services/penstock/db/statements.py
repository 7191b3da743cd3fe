"""The named statements: each .sql file of the package, which stands beside the store that uses it.

A statement begins with ``-- name: verb_noun``; the comment lines after it give its parameters and the reason for
its shape. ``SQL["claim_tasks"]`` is its text. A block that begins with ``-- part: name`` is no statement alone; it
stands wherever statements of its file say ``{name}``, those of ``parts.sql`` here in every file.
"""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SHARED = Path(__file__).with_name("parts.sql")
_BLOCK = re.compile(r"^-- (name|part): (.*?)(?=^-- (?:name|part): |\Z)", re.MULTILINE | re.DOTALL)


def _load() -> dict[str, str]:
    statements: dict[str, str] = {}
    shared: dict[str, str] = {}
    for path in (_SHARED, *sorted(set(_PACKAGE.rglob("*.sql")) - {_SHARED})):
        parts: dict[str, str] = {}
        for kind, block in _BLOCK.findall(path.read_text("utf-8")):
            name, _, text = block.partition("\n")
            if name in statements or name in parts:
                raise ValueError(f"two statements are named {name!r}; the second is in {path.relative_to(_PACKAGE)}")
            text = text.strip().removesuffix(";")
            if kind == "part":
                parts[name] = text
                continue
            for part, inserted in [*parts.items(), *shared.items()]:
                text = text.replace(f"{{{part}}}", inserted)
            statements[name] = text
        if path == _SHARED:
            shared = parts
    return statements


SQL = _load()
