"""What programs and browsers fetch of a task: payload and result as files, and its events, which docs/output.md lists.

One watch looks for the changes of all tasks that are followed; a stream reads its task only when there is one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.api.access import Authenticator
from penstock.api.dashboard.routes import Dashboard
from penstock.api.dispatch import Methods
from penstock.api.http import refusal, status_of
from penstock.api.long_polls import Watch
from penstock.api.rpc import error_body, masked
from penstock.api.server import Part
from penstock.api.streams import PING, EventStream, Streams
from penstock.db.notify import CHANNEL, OUTPUT
from penstock.db.pool import Store
from penstock.payloads.records import AADS
from penstock.protocol import errors
from penstock.protocol.answers import TaskDetail
from penstock.protocol.api_key import bind, seen
from penstock.protocol.checks import read_id
from penstock.protocol.output import OutputEntry, Seen, Shown
from penstock.protocol.views import timestamp
from penstock.runtime.budget import in_hand
from penstock.runtime.periodic import is_set_within
from penstock.tasks import output

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
}
_ROOM_BYTES = 1024 * 1024  # of output in one read
_LATE_SECONDS = 1.0  # for output that arrives behind the outcome of its task
_ENDED = "end"  # id of the last event: what is behind it is 204
_ADMITTED_SECONDS = 5.0  # a key that was revoked stops within 10 s, of which the api's own copy of the keys may take 2
# What readers take for the end of a line: in JSON the first two are blanks, the others parts of text.
_BREAKS = [(b"\n", b" "), (b"\r", b" "), *((one.encode(), b"\\u%04x" % ord(one)) for one in "\x85\u2028\u2029")]

_STATE = ("id", "action", "state", "attempts", "max_attempts", "claim", "worker", "run_at", "updated_at")
_OUTCOME = ("state", "result", "result_gone", "result_unread", "error", "reason")

_encode = msgspec.json.encode
_json = partial(Response, media_type="application/json")


class _Stream:
    """What one reader of a task has. task: how it was at the last look, as is output: how many parts it had."""

    def __init__(self, task_id: int, has: Seen) -> None:
        self.task_id = task_id
        self.seen = has
        self.admitted_at = monotonic()
        self.task: Any = None
        self.parts = 0
        self.settled_seconds: float | None = None
        self.changed = asyncio.Event()
        self.is_task_new = self.is_output_new = True
        self.sent: dict[str, bytes] = {}  # the newest event of each kind that says how the task is
        self.dropped: dict[int, int] = {}  # entries, by claim
        self.outcome = b"{}"

    @property
    def is_over(self) -> bool:
        return self.settled_seconds is not None and self.settled_seconds >= _LATE_SECONDS

    def note(self, row: Any) -> None:
        task = row["mark"], row["steps"]
        self.is_task_new = self.is_task_new or task != self.task
        self.is_output_new = self.is_output_new or row["parts"] != self.parts
        self.task, self.parts, self.settled_seconds = task, row["parts"], row["settled_seconds"]
        if self.is_task_new or self.is_output_new or self.is_over:
            self.changed.set()

    def of_task(self, task: TaskDetail) -> Iterator[bytes]:
        state = {name: getattr(task, name) for name in _STATE}
        self.outcome = _encode({name: getattr(task, name) for name in _OUTCOME})
        given = [("state", "state", _encode(state)), ("progress", "progress", _encode(task.progress))]
        given += [("step", f"step {step.name} {step.repetition}", _encode(step)) for step in task.steps or ()]
        for kind, key, data in given:
            if data not in (self.sent.get(key), b"null"):
                self.sent[key] = data
                yield _event(kind, data)

    def of_part(self, part: Shown) -> Iterator[bytes]:
        key, total = (part.claim, part.number), len(part.entries)
        begun = self.seen.count(*key)
        for place, entry in enumerate(part.entries[begun:], begun + 1):
            self.seen.add(*key, place, total)
            yield _event("chunk" if entry.is_chunk else "log", _shown(part.claim, entry), str(self.seen))
        if begun >= total:
            self.seen.add(*key, total, total)
        if part.dropped > self.dropped.get(part.claim, 0) or part.unread:
            self.dropped[part.claim] = part.dropped
            missing = {"claim": part.claim, "dropped": part.dropped, "unread": part.unread}
            yield _event("dropped", _encode(missing), str(self.seen))


class TaskRoutes(Part):
    """For callers with an API key that may read, or a browser's session."""

    def __init__(
        self, methods: Methods, store: Store, authenticator: Authenticator, dashboard: Dashboard | None
    ) -> None:
        self._methods = methods
        self._authenticator = authenticator
        self._dashboard = dashboard
        self._streams = Streams()
        self._followed: set[_Stream] = set()
        self._watch = Watch(store, self._look, lambda: bool(self._followed), (CHANNEL, OUTPUT))
        self.side_tasks = {"events": self._watch.run}
        downloads = [self._route(what, partial(self._download, what)) for what in AADS]
        self.routes = [*downloads, self._route("events", self._events)]

    def stop(self) -> None:
        self._streams.stopping.set()
        for stream in self._followed:
            stream.changed.set()

    async def _admit(self, request: Request, *, again: bool = False) -> str:
        """Bind the request to its caller's tenant; returns the name of the key. Raises AccessDenied, RateLimited.

        again: without counting a request for the rate once more.
        """
        caller = None if self._dashboard is None else await self._dashboard.caller_of(request)  # which binds
        if caller is None:
            caller = self._authenticator.admit_request(request)
            bind(caller.tenant, caller.actions)
        if not again:
            caller.charge(1)
        if not caller.may("status"):
            raise errors.AccessDenied(403, "this API key may not read tasks")
        return caller.key

    async def _admit_again(self, request: Request, stream: _Stream) -> None:
        """From time to time: its key may have been revoked. Raises as ``_admit``, Unavailable."""
        now = monotonic()
        if now - stream.admitted_at >= _ADMITTED_SECONDS:
            await self._admit(request, again=True)
            stream.admitted_at = now

    def _route(self, path: str, answer: Callable[[Request, int, str], Awaitable[Response]]) -> BaseRoute:
        """answer: called with the task's id and the name of the caller's key."""

        async def guarded(request: Request) -> Response:
            try:
                name = await self._admit(request)
                response = await answer(request, read_id(request.path_params["id"], "id"), name)
            except (errors.RateLimited, errors.Overloaded) as exc:
                response = _json(error_body(exc), *refusal(exc))
            except errors.AccessDenied as exc:
                response = _json(error_body(exc), *(refusal(exc) if exc.status == 401 else (exc.status,)))
            except errors.RpcError as exc:
                status = 404 if isinstance(exc, errors.InvalidParams) else status_of(exc, 404)
                response = _json(error_body(exc), status)
            except (errors.PayloadUnavailable, errors.PayloadLost) as exc:
                response = _json(_encode({"error": {"message": str(exc)}}), status_of(exc))
            except Exception as exc:
                response = _json(error_body(masked(exc, "download")), 503)
            response.headers.update(_HEADERS)
            return response

        return Route(f"/tasks/{{id}}/{path}", guarded, methods=["GET"])

    async def _download(self, what: str, _request: Request, task_id: int, _name: str) -> Response:
        """One object, fetched and decrypted. Raises TaskNotFound, also for a task without it; PayloadUnavailable."""
        async with self._methods.session() as session:
            rows = seen(await session.fetch("read_tasks", [task_id]))
            codec = session.codec
        if not rows or rows[0][f"{what}_gone"] or rows[0][what] is None:
            raise errors.TaskNotFound(task_id)
        body = await codec.load(rows[0][what], AADS[what](rows[0]))
        in_hand().hold(len(body))
        return _json(body, 200, {"Content-Disposition": f'attachment; filename="task-{task_id}-{what}.json"'})

    async def _events(self, request: Request, task_id: int, name: str) -> Response:
        last = request.headers.get("last-event-id", "")
        if last == _ENDED:
            return Response(status_code=204)  # which an EventSource does not ask again
        try:
            stream = _Stream(task_id, Seen(last))
        except ValueError as exc:
            raise errors.InvalidParams("Last-Event-ID", f"is none of this stream: {exc}") from None
        with self._streams.admit(name) as counted:  # raises TooManyWaits
            await self._look([stream])
            task = await self._read(stream)  # raises TaskNotFound
            return EventStream(self._follow(request, stream, task), counted.pop_all())

    async def _follow(self, request: Request, stream: _Stream, task: TaskDetail | None) -> AsyncIterator[bytes]:
        follows = request.query_params.get("follow") != "false"
        yield b"retry: 2000\n\n"
        self._followed.add(stream)
        self._watch.begun.set()
        try:
            while True:
                async for event in self._news(stream, task):
                    await self._admit_again(request, stream)
                    yield event
                if not follows or (stream.is_over and not stream.is_task_new and not stream.is_output_new):
                    break  # else it has settled while the reader was slow
                if not await is_set_within(stream.changed, _ADMITTED_SECONDS):
                    yield PING
                stream.changed.clear()
                if self._streams.stopping.is_set():
                    return
                await self._admit_again(request, stream)
                task = await self._read(stream)
            yield _event("end", stream.outcome, _ENDED)
        except (errors.RpcError, errors.Unavailable):
            return  # the reader connects again, and is answered what is wrong
        finally:
            self._followed.discard(stream)

    async def _look(self, streams: Collection[_Stream] | None = None) -> None:
        """Note changes of the tasks that are followed. Raises Unavailable."""
        streams = list(self._followed) if streams is None else streams
        async with self._methods.session() as session:
            rows = await session.fetch("look_at_tasks", list({stream.task_id for stream in streams}))
        found = {row["id"]: row for row in rows}
        for stream in streams:
            if stream.task_id in found:
                stream.note(found[stream.task_id])
            else:
                stream.is_task_new = True
                stream.changed.set()

    async def _read(self, stream: _Stream) -> TaskDetail | None:
        """The task, if it has changed. Raises TaskNotFound."""
        in_hand().renew()
        if not stream.is_task_new:
            return None
        stream.is_task_new = False
        task: TaskDetail = await self._methods.call("status", {"id": stream.task_id, "detail": True})
        return task

    async def _news(self, stream: _Stream, task: TaskDetail | None) -> AsyncIterator[bytes]:
        """Events, those of output first, as it came before the state."""
        is_full, stream.is_output_new = stream.is_output_new, False
        while is_full:
            async with self._methods.session() as session:
                parts, is_full = await output.read(session, stream.task_id, stream.seen, room_bytes=_ROOM_BYTES)
            yield b"".join(event for part in parts for event in stream.of_part(part))
        if task is not None:
            yield b"".join(stream.of_task(task))


def _shown(claim: int, entry: OutputEntry) -> bytes:
    at = timestamp(datetime.fromtimestamp(entry.at, UTC))
    if entry.is_chunk:
        return _encode({"claim": claim, "at": at, "chunk": entry.chunk})
    return _encode({"claim": claim, "at": at, "level": entry.level, "logger": entry.logger, "text": entry.text})


def _event(kind: str, data: bytes, id_: str = "") -> bytes:
    for found, written in _BREAKS:
        data = data.replace(found, written)
    named = f"id: {id_}\n" if id_ else ""
    return f"event: {kind}\n{named}data: ".encode() + data + b"\n\n"
