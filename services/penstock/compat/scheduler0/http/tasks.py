"""Async tasks: the requests that make jobs, waited for by long polls."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0 import store as stored
from penstock.compat.scheduler0.http.answers import AsyncTaskShown, Problem, answer
from penstock.compat.scheduler0.store import Progress
from penstock.db.pool import Store

LOOK_SECONDS = 0.25
LONGEST_SECONDS = 25.0  # less than most proxies wait
WAITS_LIMIT = 200  # at once; whoever comes on top of them is answered with how things stand
_NOT_FOUND = "message: task doesn't exist, code: 404"


class AsyncTasks:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopping = asyncio.Event()
        self._waits = 0

    def stop(self) -> None:
        """Answer those who wait."""
        self._stopping.set()

    async def get(self, request: Request, body: bytes) -> Response:
        """At once when it is done or has failed, else at its next change."""
        request_id = await self._request_id(request.path_params["id"])
        progress = await self._wait(request, request_id)
        async with self._store.session() as session:
            found = await stored.read_request(session, request_id)
        if found is None:
            raise Problem(404, _NOT_FOUND)
        match progress:
            case Progress.SUCCESS:
                output = found.output
            case Progress.FAILED:
                what = "; ".join(f"{error.get('name')}: {error.get('message')}" for error in found.errors[:5])
                output = json.dumps({"Message": f"failed to create jobs: {what or 'see the log'}", "Type": 500})
            case _:
                output = ""
        shown = AsyncTaskShown(
            found.id, found.request_id, found.input, output, "create_job", progress.value, found.created_at
        )
        return answer(shown)

    async def _request_id(self, text: str) -> str:
        """The name of a request; its number, which POST /jobs answers with, does as well."""
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            return text.replace("\0", "")
        async with self._store.session() as session:
            name = await stored.find_request_name(session, int(text))
        if name is None:
            raise Problem(404, _NOT_FOUND)
        return name

    async def _wait(self, request: Request, request_id: str) -> Progress:
        began, first = monotonic(), await self._look(request_id)
        if first.is_final or self._waits >= WAITS_LIMIT:
            return first
        self._waits += 1
        try:
            while not self._stopping.is_set() and monotonic() - began < LONGEST_SECONDS:
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._stopping.wait()
                except TimeoutError:
                    pass
                now = await self._look(request_id)
                if now != first or await request.is_disconnected():
                    return now
            return first
        finally:
            self._waits -= 1

    async def _look(self, request_id: str) -> Progress:
        """Raises Problem, 404."""
        async with self._store.session() as session:
            progress = await stored.progress_of(session, request_id)
        if progress is None:
            raise Problem(404, _NOT_FOUND)
        return progress
