"""What a page is rendered from: cleaned values of the request, and access to the methods."""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec.structs import fields

from penstock.api.dashboard.browser_sessions import BrowserSession
from penstock.api.dispatch import Methods
from penstock.api.table import METHODS
from penstock.protocol.errors import AccessDenied, InvalidParams
from penstock.protocol.method import described
from penstock.settings.model import Settings

PAGE_ROWS = 50
# Seconds of one unit, in which forms have what methods take in seconds.
_UNITS = {"delay": 60, "spread": 60, "older_than": 60, "newer_than": 60}
_VALUE_CHARS = 16_000


class Values(dict[str, Any]):
    """Values of a query or form, None where a value is missing."""

    def __missing__(self, _name: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PageRequest:
    browser: BrowserSession
    path: Mapping[str, str]  # parameters of its path
    query: Values  # of its query or form, without empty ones
    methods: Methods = field(repr=False)
    settings: Settings = field(repr=False)
    is_stream: bool = False  # the page is kept up to date, and so can wait for values that are expensive to read

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method with the rights of the browser, leaving out what is None. Raises its errors, AccessDenied."""
        if not self.browser.may(method):
            raise AccessDenied(403, f"Your API key may not do this ({method})")
        return await self.methods.call(method, {name: value for name, value in params.items() if value is not None})


class Page(NamedTuple):
    """A page. What no method answers is read for callers that are bound to no tenant."""

    path: str
    template: str
    load: Callable[[PageRequest], Awaitable[dict[str, Any]]]  # it may return another ``template``, or a ``redirect``
    method: str = "stats"  # a caller that may call it may see the page
    live: bool = True  # kept up to date


def cleaned(values: Mapping[str, str], *, strip: bool = True) -> Values:
    """Values of a query or form without NUL, lone surrogates, and empty ones.

    strip: also without outer blanks, which names may have.
    """
    texts = {name: value[:_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8") for name, value in values.items()}
    texts = {name: text.replace("\0", "\ufffd") for name, text in texts.items() if text.strip()}
    return Values({name: text.strip() if strip else text for name, text in texts.items()})


def params_of(method: str, values: Mapping[str, str], units: Mapping[str, int] = _UNITS) -> dict[str, Any]:
    """Parameters of a method from the fields of their names, as their types say. Raises InvalidParams.

    A list is made of the field in the singular. A limit whose field is empty is removed: raw JSON, since a call
    leaves out None.
    """
    params: dict[str, Any] = {}
    for one in fields(METHODS[method].params):
        kind, _ = described(one.type)
        kinds = {get_origin(part) or part for part in get_args(kind) or (kind,)}
        text = values.get(one.name.removesuffix("s") if list in kinds else one.name)
        if text is not None:
            params[one.name] = _parameter(one.name, text, kinds, units.get(one.name, 1))
        elif one.default is msgspec.UNSET:
            params[one.name] = msgspec.Raw(b"null")
    return params


def _parameter(name: str, text: str, kinds: set[Any], unit: int) -> Any:
    if name in ("run_at", "since", "until"):
        return utc(text)
    if list in kinds:
        return [text]
    if dict in kinds:
        return labels_of(text)
    if bool in kinds:
        return text != "no"
    if float in kinds:
        return number_of(text, name, unit=unit)
    return number_of(text, name, int) if int in kinds and str not in kinds else text


def number_of(text: str, name: str, kind: type[int] | type[float] = float, *, unit: int = 1) -> float:
    """Raises InvalidParams, also for what is beyond a bigint or a double: JSON would make null of an infinity."""
    try:
        number = kind(text) * unit
        fits = abs(number) < 2**63 if kind is int else math.isfinite(number)
    except ValueError:
        fits = False
    if not fits:
        raise InvalidParams(name, f"must be {'a whole number' if kind is int else 'a number'}, not {text[:60]!r}")
    return number


def labels_of(text: str) -> dict[str, str]:
    """``name=value name=value`` as labels; a name alone has an empty value."""
    parts = text.replace(",", " ").split()
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def utc(text: str) -> str:
    """An instant from a form field, which has no zone: UTC."""
    if text.endswith("Z") or "+" in text[10:] or "-" in text[10:]:
        return text
    return f"{text}:00Z" if len(text) == 16 else f"{text}Z"
