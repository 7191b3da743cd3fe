"""What a page is rendered from: cleaned values of the request, and access to the methods."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.api.dashboard.browser_sessions import BrowserSession
from penstock.api.dispatch import Methods
from penstock.protocol.errors import AccessDenied
from penstock.settings.model import Settings

PAGE_ROWS = 50
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


def cleaned(values: Mapping[str, str]) -> Values:
    """Values of a query or form without NUL, lone surrogates, outer blanks, and empty ones."""
    texts = {name: value[:_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8") for name, value in values.items()}
    texts = {name: text.replace("\0", "\ufffd").strip() for name, text in texts.items()}
    return Values({name: text for name, text in texts.items() if text})


def labels_of(text: str | None) -> dict[str, str] | None:
    """``name=value name=value`` as labels; a name alone has an empty value."""
    if not text:
        return None
    parts = text.replace(",", " ").split()
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def utc(text: str | None) -> str | None:
    """An instant from a form field, which has no zone: UTC."""
    if text is None or text.endswith("Z") or "+" in text[10:] or "-" in text[10:]:
        return text
    return f"{text}:00Z" if len(text) == 16 else f"{text}Z"
