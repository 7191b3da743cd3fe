"""What a page is given to show itself: the request's values, cleaned, and the ways to the data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.api.dashboard.browser_sessions import Visitor
from penstock.api.dispatch import Methods
from penstock.db.session import Session
from penstock.protocol.errors import AccessDenied
from penstock.settings.model import Settings

PAGE_ROWS = 50
_VALUE_CHARS = 16_000


class Values(dict[str, Any]):
    """Values of a form, None where nothing was given."""

    def __missing__(self, _name: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Ask:
    """One look at a page. path: parameters of its path; query: of its query, without those that are empty.

    follows: it is kept up to date, and so can wait for what is dear to read.
    """

    visitor: Visitor
    path: Mapping[str, str]
    query: Mapping[str, str]
    methods: Methods = field(repr=False)
    settings: Settings = field(repr=False)
    follows: bool = False

    async def call(self, method: str, **params: Any) -> Any:
        """Carry out a method as the visitor. Raises what it raises, AccessDenied."""
        if not self.visitor.may(method):
            raise AccessDenied(403, f"Your API key may not do this ({method})")
        return await self.methods.call(method, {name: value for name, value in params.items() if value is not None})

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self.methods.session()

    def get(self, name: str) -> str | None:
        return self.query.get(name)


class Page(NamedTuple):
    """A page: what it reads and how that looks. method: whoever may call it may see the page. live: kept up to date.

    What it reads may name another ``template``, or a ``redirect``. What no method gives it, it reads for those alone
    who are bound to no tenant.
    """

    path: str
    template: str
    load: Callable[[Ask], Awaitable[dict[str, Any]]]
    method: str = "stats"
    live: bool = True


def cleaned(values: Mapping[str, str]) -> dict[str, str]:
    """Values of a query or form: what nobody types on purpose is replaced, what is empty is left out."""
    result = {}
    for name, value in values.items():
        text = value[:_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd").strip()
        if text:
            result[name] = text
    return result


def labels_of(text: str | None) -> dict[str, str] | None:
    """``name=value name=value`` as labels; a name alone stands for an empty value."""
    if not text:
        return None
    parts = text.replace(",", " ").split()
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def utc(text: str | None) -> str | None:
    """An instant as a field of a form gives it, without a zone, which is then UTC."""
    if text is None:
        return None
    has_zone = text.endswith("Z") or "+" in text[10:] or "-" in text[10:]
    whole = text + ":00" if len(text) == 16 else text
    return text if has_zone else whole + "Z"
