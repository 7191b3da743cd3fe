"""Async tasks: the requests that create jobs, with long polls for their progress."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from enum import IntEnum
from time import monotonic
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.messages import Problem, answer
from penstock.db.pool import Store
from penstock.runtime.periodic import is_set_within

LOOK_SECONDS = 0.25
LONGEST_SECONDS = 25.0  # less than most proxies wait
WAITS_LIMIT = 200  # at once; further requests are answered without waiting


class Progress(IntEnum):
    NOT_STARTED = 0
    IN_PROGRESS = 1
    SUCCESS = 2
    FAILED = 3


class AsyncTask(msgspec.Struct, rename="camel"):
    """output: JSON, once it has succeeded or failed."""

    id: int
    request_id: str
    input: str
    output: str
    service: str
    state: Progress
    date_created: datetime


class AsyncTasks:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopping = asyncio.Event()
        self._waits = 0

    def stop(self) -> None:
        """End all long polls."""
        self._stopping.set()

    async def get(self, request: Request, body: bytes) -> Response:
        """Answer at once if it has succeeded or failed, else at its next change."""
        request_id = await self._request_id(request.path_params["id"])
        progress = await self._wait(request, request_id)
        row = await self._row("read_request", request_id)
        match progress:
            case Progress.SUCCESS:
                output = row["output"]
            case Progress.FAILED:
                errors = msgspec.json.decode(row["errors"]) if row["errors"] else []
                what = "; ".join(f"{error.get('name')}: {error.get('message')}" for error in errors[:5])
                output = json.dumps({"Message": f"failed to create jobs: {what or 'see the log'}", "Type": 500})
            case _:
                output = ""
        return answer(AsyncTask(row["id"], request_id, row["input"], output, "create_job", progress, row["created_at"]))

    async def _row(self, statement: str, argument: int | str) -> Any:
        """The row that a statement returns. Raises Problem, 404."""
        async with self._store.session() as session:
            rows = await session.fetch(statement, argument)
        if not rows:
            raise Problem(404, "message: task doesn't exist, code: 404")
        return rows[0]

    async def _request_id(self, text: str) -> str:
        """The id of a request; callers may also give its number, with which POST /jobs answers."""
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            return text.replace("\0", "")
        found: str = (await self._row("find_request_name", int(text)))["request_id"]
        return found

    async def _wait(self, request: Request, request_id: str) -> Progress:
        began, first = monotonic(), await self._look(request_id)
        if first >= Progress.SUCCESS or self._waits >= WAITS_LIMIT:
            return first
        self._waits += 1
        try:
            while not self._stopping.is_set() and monotonic() - began < LONGEST_SECONDS:
                await is_set_within(self._stopping, LOOK_SECONDS)
                now = await self._look(request_id)
                if now != first or await request.is_disconnected():
                    return now
            return first
        finally:
            self._waits -= 1

    async def _look(self, request_id: str) -> Progress:
        """Raises Problem, 404."""
        row = await self._row("find_request", request_id)
        if not row["known"]:  # a deleted import had finished
            return Progress.SUCCESS
        if row["finished"]:
            return Progress.FAILED if row["refused"] else Progress.SUCCESS
        return Progress.IN_PROGRESS if row["seen"] else Progress.NOT_STARTED
