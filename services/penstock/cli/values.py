"""Values as people type and read them, to and from those of the api."""

import json
import math
import re
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import typer

from penstock.protocol.json_text import no_constant
from penstock.protocol.task import SHOWN_STATES, State

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration(text: str) -> float:
    """Seconds, given as a number or with units: 90, 10s, 5m, 1h30m, 2d. Raises typer.BadParameter."""
    parts = _PART.findall(text)
    is_in_units = bool(parts) and "".join(number + unit for number, unit in parts) == text
    with suppress(ValueError):
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts) if is_in_units else float(text)
        if 0 <= seconds < math.inf:
            return seconds
    raise typer.BadParameter(f"{text!r} is not a duration: give seconds, or units as in 10s, 5m, 1h30m, 2d")


duration_option = partial(typer.Option, parser=duration, metavar="DURATION")
_STATES = {shown.upper(): State(state) for state, shown in SHOWN_STATES.items()} | {
    state.value: state for state in State
}
STATE_STYLES = {
    "SUCCESS": "green", "CRITICAL_ERROR": "red", "CANCELLED": "dim", "ACQUIRED": "cyan", "ERROR": "yellow",
}  # fmt: skip
STATES_HELP = ", ".join(f"{state} ({SHOWN_STATES[state]})" if state in SHOWN_STATES else state for state in State)


def state(text: str) -> str:
    """A state of tasks, by its value or as shown, in any case. Raises typer.BadParameter, which lists them."""
    found = _STATES.get(text.upper())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a state: give one of {STATES_HELP}")
    return found.value


def state_label(state: str) -> str:
    """A state as a person reads it; other values, such as those of workflows, stay."""
    return SHOWN_STATES.get(state, state)


def instant(text: str) -> str | int:
    """RFC 3339 unchanged, epoch milliseconds as a number."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def labels(pairs: list[str]) -> dict[str, str]:
    """The values of --label. Raises typer.BadParameter for a value that is not NAME=TEXT."""
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not NAME=TEXT", param_hint="--label")
        found[name] = text
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond a double")
    return number


def read_json(text: str) -> Any:
    """JSON that can be sent to the api. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=no_constant, parse_float=_finite)


def json_value(text: str, what: str) -> Any:
    """A value given as JSON, or on standard input by "-". Raises typer.BadParameter, which calls it by ``what``."""
    try:
        return read_json(sys.stdin.read() if text == "-" else text)
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"the {what} is not JSON: {exc}", param_hint="JSON") from exc
