"""Writes docs/openrpc.json, the reference of docs/methods.md and the help of commands: `make reference`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import penstock.cli
from docs.generated import row, write
from penstock.api.table import METHODS, describe, method_of

PAGE = Path(__file__).with_name("methods.md")
DOCUMENT = Path(__file__).with_name("openrpc.json")
SUMMARIES = Path(penstock.cli.__file__).with_name("summaries.json")
_SHORT = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}

Schema = Mapping[str, Any]


def document() -> bytes:
    """The answer of rpc.discover, a member a line."""
    return msgspec.json.format(msgspec.json.encode(describe()), indent=2) + b"\n"


def summaries() -> str:
    """What each method does, for the command line, which does not load them."""
    return json.dumps({name: method.summary for name, method in METHODS.items()}, indent=2) + "\n"


def reference() -> str:
    """The part of the page below the mark."""
    described = describe()
    lines: list[str] = []
    for group, methods in _by_group(described["methods"]).items():
        lines.append(f"\n## {group}\n")
        for method in methods:
            lines += _method(method)
    lines.append("\n## Results\n")
    for name, schema in sorted(described["components"]["schemas"].items()):
        lines += _result(name, schema)
    lines += ["## Errors\n", row("error", "code", "meaning"), row("---", "---", "---")]
    lines += [
        row(f"`{name}`", f"`{error['code']}`", f"{error['message']}.")
        for name, error in described["components"]["errors"].items()
    ]
    return "\n".join(lines) + "\n"


def _by_group(methods: Iterable[Schema]) -> dict[str, list[Schema]]:
    """By what stands before the dot; those of single tasks, which have none, come first."""
    groups: dict[str, list[Schema]] = {}
    for method in methods:
        family, dot, _ = method["name"].partition(".")
        groups.setdefault(f"Methods of {family}" if dot else "Tasks", []).append(method)
    return groups


def _method(method: Schema) -> Iterator[str]:
    yield f"### {method['name'].replace('<', '&lt;')}\n"
    yield method["summary"] + "\n"
    if "description" in method:
        yield method["description"] + "\n"
    if method["params"]:
        yield row("parameter", "takes", "meaning")
        yield row("---", "---", "---")
        for parameter in method["params"]:
            yield row(f"`{parameter['name']}`", _taken(parameter), parameter["description"])
        yield ""
    declared = method_of(method["name"])
    assert declared is not None
    yield f"Answers {_kind(method['result']['schema'])}. Permission: `{declared.permission.value}`."
    errors = [reference["$ref"].rpartition("/")[2] for reference in method["errors"]]
    yield f"Errors: {', '.join(f'[`{error}`](#errors)' for error in errors)}.\n"


def _taken(parameter: Schema) -> str:
    schema = parameter["schema"]
    parts = [_kind(schema)]
    if parameter["required"]:
        parts.append("required")
    elif schema.get("default") is not None:
        parts.append(f"default `{json.dumps(schema['default'])}`")
    return "; ".join(parts)


def _result(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}\n"
    if "description" in schema:
        yield " ".join(schema["description"].split()) + "\n"
    members = schema.get("properties")
    if members is None:
        yield f"{_kind(schema)}.\n"
        return
    yield row("member", "is", "meaning")
    yield row("---", "---", "---")
    for member, kind in members.items():
        optional = "" if member in schema.get("required", ()) else "; may be left out"
        yield row(f"`{member}`", _kind(kind) + optional, kind.get("description", ""))
    yield ""


def _kind(schema: Schema) -> str:
    """What a schema admits, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"]))
    kinds = schema.get("type", "any JSON")
    return " or ".join(_kind_of(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _kind_of(kind: str, schema: Schema) -> str:
    if kind == "array":
        items = schema.get("items")
        return f"array of {_kind(items)}" if items else "array"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_kind(values)}" if isinstance(values, Mapping) and values else "object"
    return _SHORT.get(kind, kind)


if __name__ == "__main__":
    DOCUMENT.write_bytes(document())
    SUMMARIES.write_text(summaries(), "utf-8")
    write(PAGE, reference)
