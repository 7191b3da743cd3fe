"""Requests and answers: numbers, paging and bodies, and the envelope ``{"data": ..., "success": ...}``."""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.audit import Declined
from penstock.compat.scheduler0.jobs import Instant

PAGE_LIMIT = 50_000  # rows of a page; ``limit`` of a longer one's answer is this
_BIGINT = 2**63 - 1
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_HEADERS = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}  # the server adds X-Frame-Options
Shape = TypeVar("Shape")


class Problem(Declined):
    """A request that is answered with an error. data: of the envelope, in most cases a text."""

    def __init__(self, status: int, data: Any) -> None:
        super().__init__(str(data))
        self.status = status
        self.data = data


def answer(data: Any, status: int = 200, *, success: bool = True, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"data": data, "success": success})
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")


def nothing() -> Response:
    return Response(status_code=204, headers=_HEADERS)


def number(text: str) -> int:
    """A number of a path or a query. Raises Problem, 400, with the text of Go's parser."""
    shown = msgspec.json.encode(text[:60]).decode()
    if not _NUMBER.fullmatch(text):
        raise Problem(400, f"strconv.Atoi: parsing {shown}: invalid syntax")
    if not -_BIGINT <= (value := int(text)) <= _BIGINT:
        raise Problem(400, f"strconv.Atoi: parsing {shown}: value out of range")
    return value


def path_id(request: Request) -> int:
    """Raises Problem, 400."""
    return number(request.path_params["id"])


def optional_number(query: QueryParams, name: str) -> int | None:
    """Raises Problem, 400."""
    text = query.get(name, "")
    return number(text) if text else None


def required_text(query: QueryParams, name: str) -> str:
    """Raises Problem, 400."""
    text = query.get(name, "")
    if not text:
        raise Problem(400, f"{name} is not provided")
    return text


def page(query: QueryParams) -> tuple[int, int]:
    """Limit and offset, both of them required. Raises Problem, 400."""
    limit, offset = map(number, [required_text(query, name) for name in ("limit", "offset")])
    for name, value in (("limit", limit), ("offset", offset)):
        if value < 0:
            raise Problem(400, f"{name} must not be negative, but is {value}")
    return min(limit, PAGE_LIMIT), offset


def optional_instant(query: QueryParams, name: str) -> datetime | None:
    """RFC 3339 with a zone. Raises Problem, 400."""
    text = query.get(name, "")
    try:
        return msgspec.convert(text, Instant) if text else None
    except msgspec.ValidationError:
        raise Problem(400, f"{name} must be RFC 3339 such as 2030-01-31T08:00:00Z, not {text[:60]!r}") from None


def decode(
    body: bytes, shape: type[Shape], *, status: int = 422, read: Callable[..., Any] = msgspec.json.decode
) -> Shape:
    """Decode a body. Raises Problem: 400 without a body, ``status`` for an invalid one."""
    if not body.strip():
        raise Problem(400, "request body required")
    try:
        decoded: Shape = read(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Problem(status, f"the body cannot be read: {exc}") from None
    return decoded
