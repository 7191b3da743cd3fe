"""Async tasks: the requests that create jobs, with long polls for their progress."""

import asyncio
import json
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
        request_id = request.path_params["id"].replace("\0", "")
        if request_id.isascii() and request_id.isdigit() and len(request_id) < 19:
            # Its number, with which POST /jobs answers.
            request_id = (await self._row("find_request_name", int(request_id)))["request_id"]
        progress = await self._wait(request, request_id)
        row = await self._row("read_request", request_id)
        output = ""
        if progress is Progress.SUCCESS:
            output = row["output"]
        elif progress is Progress.FAILED:
            errors = msgspec.json.decode(row["errors"]) if row["errors"] else []
            what = "; ".join(f"{error.get('name')}: {error.get('message')}" for error in errors[:5])
            output = json.dumps({"Message": f"failed to create jobs: {what or 'see the log'}", "Type": 500})
        return answer({
            "id": row["id"], "requestId": request_id, "input": row["input"], "output": output, "service": "create_job",
            "state": progress, "dateCreated": row["created_at"],
        })  # fmt: skip

    async def _row(self, statement: str, argument: int | str) -> Any:
        """The row that a statement returns. Raises Problem, 404."""
        rows = await self._store.fetch(statement, argument)
        if not rows:
            raise Problem(404, "message: task doesn't exist, code: 404")
        return rows[0]

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
        row = await self._row("find_request", request_id)
        if not row["known"]:  # a deleted import had finished
            return Progress.SUCCESS
        if row["finished"]:
            return Progress.FAILED if row["refused"] else Progress.SUCCESS
        return Progress.IN_PROGRESS if row["seen"] else Progress.NOT_STARTED
