"""Values as they are typed, read into what the api takes."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn

import typer

from penstock.protocol.task import State

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration(text: str) -> float:
    """Seconds, given as a number of them or with units: 90, 10s, 5m, 1h30m, 2d. Raises typer.BadParameter."""
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"{text!r} is no duration: give seconds, or units as in 10s, 5m, 1h30m, 2d")
    return seconds


def duration_option(*names: str, help: str) -> Any:
    """An option that takes a duration."""
    return typer.Option(*names, parser=duration, metavar="DURATION", show_default=False, help=help)


def state(text: str) -> str:
    """A state of tasks, in any case of letters. Raises typer.BadParameter, which lists them."""
    if text.upper() not in list(State):
        raise typer.BadParameter(f"{text!r} is no state: give one of {', '.join(State)}")
    return text.upper()


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
