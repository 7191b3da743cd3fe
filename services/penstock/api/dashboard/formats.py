"""Filters of the templates: values as text. Pure."""

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from markupsafe import Markup, escape

from penstock.protocol.json_text import decode_any
from penstock.protocol.output import OutputEntry
from penstock.protocol.task import SHOWN_STATES
from penstock.protocol.views import span, trimmed
from penstock.runtime.logs import printable

_SHOWN_BYTES = 64 * 1024
_FOLDED_DEPTH = 20  # browsers flatten what is nested deeply
_LONG_LINES = 40  # of an object or array inside another: it is folded at first


def number(value: float | None) -> str:
    """``12,345``; below 100 with up to two decimals."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return trimmed(value, 2) if abs(value) < 10 else f"{value:.1f}"


def compact(value: float | None) -> str:
    """``950``, ``12.3k``, ``5.1M``: at most four digits, for axes and badges."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value is not None and abs(value) >= size:
            return trimmed(value / size, 1) + unit
    return number(value)


def when(value: str | datetime | None, *, relative: bool = True) -> Markup:
    """An instant, or RFC 3339 as methods answer it; the script shows it as ``3 min ago`` and updates that."""
    instant = datetime.fromisoformat(value) if isinstance(value, str) else value
    if instant is None:
        return Markup('<span class="faint">–</span>')
    utc = instant.astimezone(UTC)
    text = utc.strftime("%Y-%m-%d %H:%M:%S")
    mark = Markup(" data-ago" if relative else "")
    return Markup('<time datetime="{}" title="{} UTC"{}>{}</time>').format(
        utc.isoformat(timespec="milliseconds").replace("+00:00", "Z"), text, mark, text
    )


def pretty(value: Any) -> str:
    """JSON as ``indented``, at most 64 KiB of it."""
    text = indented(value)
    if len(text) > _SHOWN_BYTES:
        return text[:_SHOWN_BYTES] + f"\n… {len(text) - _SHOWN_BYTES:,} more characters; `status` with `detail` has all"
    return text


def indented(value: Any) -> str:
    """JSON with its numbers unchanged; indented unless it is large, since deep nesting would grow it a hundredfold."""
    raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
    return (msgspec.json.format(raw, indent=2) if len(raw) <= _SHOWN_BYTES else raw).decode("utf-8")


def folded(value: Any) -> Markup:
    """``pretty`` with each object and array in a ``details``; the text of all of it is still the JSON."""
    lines = pretty(value).split("\n")
    open_at: list[int] = []
    ends: dict[int, int] = {}  # last line of each object and array by its first
    for place, line in enumerate(lines):
        if line.endswith(("{", "[")):
            open_at.append(place)
        elif line.lstrip().startswith(("}", "]")) and open_at:
            ends[open_at.pop()] = place
    made: list[str] = []
    closing: list[int] = []  # last lines of the folds that are open, the innermost behind
    for place, line in enumerate(lines):
        if place in closing[-1:]:
            made.append("</details>")
            closing.pop()
        end = ends.get(place)
        if end is None or len(closing) >= _FOLDED_DEPTH:
            made.append(escape(line + "\n"))
            continue
        is_open = not closing or end - place <= _LONG_LINES
        closing.append(end)
        made.append(
            Markup('<details{}><summary><span data-folded="{}">{}</span>\n</summary>').format(
                Markup(" open" if is_open else ""), f" {end - place - 1} lines ", line
            )
        )
    return Markup("").join(map(Markup, made))


def plain(value: Any) -> Any:
    """Decode JSON that a method answers undecoded."""
    return decode_any(bytes(value)) if isinstance(value, msgspec.Raw) else value


def error_parts(value: Any) -> dict[str, Any]:
    """Kind, message, traceback and the rest of an error object of any shape."""
    error = plain(value)
    if not isinstance(error, dict):
        error = {} if error is None else {"message": error}
    data = error.get("data")
    data = dict(data) if isinstance(data, dict) else ({} if data is None else {"data": data})
    trace = data.pop("traceback", "")
    return {
        "kind": _text(data.pop("type", "")),
        "message": _text(data.pop("message", "") or error.get("message", "")),
        "traceback": "".join(map(_text, trace)) if isinstance(trace, list) else _text(trace or ""),
        "rest": data,
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def query(values: dict[str, Any] | None = None, **more: Any) -> str:
    """A query string with its ``?``, without empty values."""
    given = {name: value for name, value in ({**(values or {}), **more}).items() if value not in (None, "", [])}
    return "?" + urlencode(given, doseq=True) if given else ""


def segment(value: str) -> str:
    return quote(str(value), safe="")


def word(value: str) -> str:
    """A state as people read it: ERROR is retrying, CRITICAL_ERROR failed."""
    return SHOWN_STATES.get(value, value).replace("_", " ").lower()


def badge(state: str | None) -> Markup:
    if state is None:
        return Markup("")
    return Markup('<span class="badge s-{}">{}</span>').format(state.lower(), word(state))


def output_line(entry: OutputEntry) -> str:
    """A log line or chunk of a task, with its time of day."""
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%H:%M:%S.%f")[:-3]
    if entry.is_chunk:
        chunk = decode_any(bytes(entry.chunk))
        return printable(f"{at}  {chunk if isinstance(chunk, str) else bytes(entry.chunk).decode()}")
    source = f" {entry.logger}:" if entry.logger else ""
    return printable(f"{at}  {entry.level or 'log'}{source} {entry.text}")


FILTERS = {
    each.__name__: each
    for each in (
        number, compact, span, when, pretty, folded, plain, error_parts, segment, printable, word, badge, output_line,
    )
}  # fmt: skip
