"""What a request says: numbers, paging, bodies; wrong ones are told in the words of the original."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from penstock.compat.scheduler0.http.answers import Problem

PAGE_LIMIT = 50_000
"""Rows of one page at the most; a page that is cut to this says so by its ``limit``."""
_BIGINT = 2**63 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
Shape = TypeVar("Shape")


def number(text: str) -> int:
    """A number of a path or a query. Raises Problem, 400, with the text of Go's parser."""
    shown = msgspec.json.encode(text[:60]).decode()
    if not _NUMBER.fullmatch(text):
        raise Problem(400, f"strconv.Atoi: parsing {shown}: invalid syntax")
    value = int(text)
    if not -_BIGINT <= value <= _BIGINT:
        raise Problem(400, f"strconv.Atoi: parsing {shown}: value out of range")
    return value


def wanted_number(query: QueryParams, name: str) -> int:
    """One that must be given. Raises Problem."""
    return number(_wanted(query, name))


def optional_number(query: QueryParams, name: str) -> int | None:
    text = query.get(name, "")
    return number(text) if text else None


def optional_instant(query: QueryParams, name: str) -> datetime | None:
    """RFC 3339 with a zone. Raises Problem."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        found = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        found = None
    if found is None or found.tzinfo is None:
        raise Problem(400, f"{name} must be RFC 3339 such as 2030-01-31T08:00:00Z, not {text[:60]!r}")
    return found


def page(query: QueryParams) -> tuple[int, int]:
    """Limit and offset, both of which must be given, the limit first. Raises Problem."""
    texts = [_wanted(query, name) for name in ("limit", "offset")]
    limit, offset = map(number, texts)
    for name, value in (("limit", limit), ("offset", offset)):
        if value < 0:
            raise Problem(400, f"{name} must not be negative, but is {value}")
    return min(limit, PAGE_LIMIT), offset


def path_id(request: Request) -> int:
    """Raises Problem, 400."""
    return number(request.path_params["id"])


def decode(body: bytes, read: Callable[[bytes], Shape], *, status: int = 422) -> Shape:
    """What a body says. Raises Problem: 400 without a body, the status for one that cannot be read."""
    if not body.strip():
        raise Problem(400, "request body required")
    try:
        return read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Problem(status, f"the body cannot be read: {exc}") from None


def account_of(request: Request) -> int:
    """What a newer client says of its account, of which there is one here: it is told the same back."""
    text = request.headers.get("x-account-id", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) else 0


def _wanted(query: QueryParams, name: str) -> Any:
    text = query.get(name, "")
    if not text:
        raise Problem(400, f"{name} is not provided")
    return text
