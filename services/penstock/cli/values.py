"""Values as they are typed, read into what the api takes."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import typer


def instant(text: str | None) -> str | int | None:
    """RFC 3339 as it is, epoch milliseconds as a number."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() else text


def labels(pairs: list[str] | None) -> dict[str, str] | None:
    """What --label was given; None where it was not. Raises typer.BadParameter for what is not NAME=TEXT."""
    found = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not NAME=TEXT", param_hint="--label")
        found[name] = text
    return found or None


def json_value(text: str, what: str) -> Any:
    """A value given as JSON, or on standard input where the text is "-". Raises typer.BadParameter for what is none.

    what: how an error names it, as "payload".
    """
    try:
        return json.loads(sys.stdin.read() if text == "-" else text, parse_constant=_no_constant)
    except json.JSONDecodeError as exc:
        raise typer.BadParameter(
            f"the {what} is not JSON at line {exc.lineno}, column {exc.colno}: {exc.msg}", param_hint="JSON"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"the {what} is not JSON: {exc}", param_hint="JSON") from exc


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
