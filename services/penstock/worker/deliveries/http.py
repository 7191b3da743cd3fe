"""http.request: one HTTP request as a task, its answer as the task's result."""

import base64
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.protocol.errors import RateLimited
from penstock.protocol.webhook_signatures import signature_headers
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable, content_of
from penstock.worker.deliveries.http_client import MAX_REDIRECTS, HttpClient, Response, read_url, shown_text
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Context
from penstock.worker.responses import cut

ACTION = "http.request"
DEFAULT_EXPECTED = ("200-299",)
# Another attempt would get the same. 408, 425 and 429 ask for a later one, and 5xx may pass.
DEFAULT_FINAL = ("300-407", "409-424", "426-428", "430-499")
DEFAULT_KEPT_HEADERS = ("content-type", "date", "etag", "last-modified", "location", "retry-after", "x-request-id")
_ASK_TO_WAIT = (429, 503)  # with Retry-After: the attempt does not count, and tasks of the same limit_key wait too
_SHOWN_CHARS = 300  # of an unexpected answer's body, in the error
_KEPT_HEADER_CHARS = 1000
_MAX_KEPT_HEADERS = 50
_ENVELOPE_BYTES = 2048  # of a result, for what is not body and headers
_IDEMPOTENCY_HEADER = "Idempotency-Key"
_RANGE = re.compile(r"([1-5]\d\d)(?:-([1-5]\d\d))?")


def add_to(deliveries: Deliveries) -> None:
    deliveries.action(ACTION, Requests(deliveries.http, deliveries.settings).request, bad_params_attempts=1)


class Requests:
    def __init__(self, client: HttpClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings

    async def request(
        self,
        ctx: Context,
        /,
        *,
        url: str,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        body: str | None = None,
        body_base64: bytes | None = None,
        json: Any = msgspec.UNSET,
        timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None,
        expected_status: list[int | str] | None = None,
        final_status: list[int | str] | None = None,
        redirects: Annotated[int, Meta(ge=0, le=MAX_REDIRECTS)] = 0,
        sign: str | None = None,
        idempotency_key: str | None = None,
        keep_headers: list[str] | None = None,
        keep_bytes: Annotated[int, Meta(ge=0)] | None = None,
    ) -> dict[str, Any]:
        """Make the request; its answer is the result. docs/deliveries.md describes the parameters."""
        largest = self._settings.http_response_limit_bytes
        limit_bytes = largest if keep_bytes is None else min(keep_bytes, largest)
        content, content_type = content_of(body, body_base64, json, "body_base64") or (None, None)
        expected = statuses("expected_status", DEFAULT_EXPECTED if expected_status is None else expected_status)
        final = statuses("final_status", DEFAULT_FINAL if final_status is None else final_status)
        sent = dict(headers or {})
        names = {name.lower() for name in sent}
        if content_type is not None and "content-type" not in names:
            sent["Content-Type"] = content_type
        # The same in all attempts of a task.
        key = f"penstock-{ctx.task_id}" if idempotency_key is None else idempotency_key
        if _IDEMPOTENCY_HEADER.lower() not in names:
            sent[_IDEMPOTENCY_HEADER] = key
        if sign is not None:
            sent |= self._signature(sign, url, key, content or b"", names)
        reply = await self._client.request(
            method or ("GET" if content is None else "POST"),
            url,
            headers=sent,
            body=content or b"",
            timeout_seconds=timeout or self._settings.http_timeout_seconds,
            redirects=redirects,
            limit_bytes=max(limit_bytes, _SHOWN_CHARS),
        )
        if reply.status not in expected:
            self._refuse(reply, final)
        return self._result(reply, limit_bytes, keep_headers)

    def _signature(self, name: str, url: str, key: str, content: bytes, names: set[str]) -> dict[str, str]:
        """Headers that sign the request. Raises NotDelivered, Undeliverable."""
        hosts = self._settings.signing_hosts.get(name)
        target = read_url(url)
        host = (target.raw_host or "").lower()  # as it is connected to
        forms = [host]
        with suppress(UnicodeError):
            forms.append((target.host or "").lower())
        if hosts is not None and not any(fnmatchcase(form.rstrip("."), one) for form in forms for one in hosts):
            raise Undeliverable(
                f"the secret {name} does not sign for the host {host[:100]!r}: {PREFIX}HTTP_SIGNING_HOSTS has "
                "those that it signs for"
            )
        secrets = self._settings.signing_secrets.get(name)
        if secrets is None:
            # Not final: workers get a new secret one after the other.
            known = ", ".join(sorted(self._settings.signing_secrets)) or "none"
            raise NotDelivered(f"there is no secret {name[:100]!r} in {PREFIX}HTTP_SIGNING_SECRETS; there is {known}")
        given = signature_headers(secrets, message_id=key, timestamp=int(time.time()), body=content)
        taken = names & {header.lower() for header in given}
        if taken:
            raise Undeliverable(f"the header {min(taken)} is the signature's: leave it out, or leave out sign")
        return given

    def _refuse(self, reply: Response, final: frozenset[int]) -> None:
        text = f"{reply.url} answered {reply.status}"
        location = reply.headers.get("Location")
        if 300 <= reply.status < 400 and location is not None:
            text += f", a redirect to {shown_text(location)!r}: give that URL, or redirects to follow it"
        elif reply.body:
            text += f": {reply.body[:_SHOWN_CHARS].decode('utf-8', 'replace')}"
        if reply.status in final:
            raise Undeliverable(text)
        pause = retry_after_seconds(reply.headers, now=time.time())
        if pause is not None:
            longest = self._settings.retry_cap_seconds
            shortest = min(self._settings.retry_base_seconds, longest)
            # A little more, so that not all come at once.
            pause = min(max(pause, shortest) * random.uniform(1, 1 + self._settings.retry_jitter), longest)
            if reply.status in _ASK_TO_WAIT:
                raise RateLimited(pause, key=True, reason=text)
        raise NotDelivered(text, pause)

    def _result(self, reply: Response, limit_bytes: int, keep_headers: Sequence[str] | None) -> dict[str, Any]:
        names = DEFAULT_KEPT_HEADERS if keep_headers is None else keep_headers[:_MAX_KEPT_HEADERS]
        kept = {
            name.lower(): ", ".join(reply.headers.getall(name))[:_KEPT_HEADER_CHARS]
            for name in names
            if name in reply.headers
        }
        room = self._settings.result_limit_bytes - _ENVELOPE_BYTES - len(json.dumps([reply.url, kept]))
        is_whole = reply.is_whole and len(reply.body) <= limit_bytes
        shown, fits = _shown_body(reply.body[:limit_bytes], is_whole, max(0, room))
        is_cut = not (is_whole and fits)
        result = {"status": reply.status, "url": reply.url, "headers": kept, **shown, "truncated": is_cut}
        if reply.redirects:
            result["redirects"] = reply.redirects
        return result


def statuses(name: str, given: Sequence[int | str]) -> frozenset[int]:
    """The statuses of a list such as ``[200, "201-204", "3xx"]``. Raises Undeliverable."""
    found: set[int] = set()
    for entry in given:
        match = _RANGE.fullmatch(re.sub("^([1-5])xx$", r"\g<1>00-\g<1>99", str(entry)))
        if match is None:
            raise Undeliverable(f'{name} has {entry!r}: take statuses of 100 to 599, such as 200, "201-204" or "2xx"')
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds of an answer's Retry-After, None without a valid one; a date is counted from the answer's own Date."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    until = _date(text)
    return None if until is None else max(0.0, until - (_date(headers.get("Date", "")) or now))


def _date(text: str) -> float | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _shown_body(body: bytes, is_whole: bool, room: int) -> tuple[dict[str, str], bool]:
    """A body as text, or else in base64, within so many bytes of JSON; and whether it fits."""
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        if is_whole or len(body) - exc.start > 3:  # else it was cut within a character
            fitting = body[: max(0, room // 4 * 3)]
            return {"body_base64": base64.b64encode(fitting).decode()}, len(fitting) == len(body)
        text = body[: exc.start].decode()
    return {"body": cut(text, room)}, len(json.dumps(text)) <= room
