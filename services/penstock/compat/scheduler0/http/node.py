"""What the original asks of a node of its cluster. There is none here: every api is as good as any other."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.answers import answer
from penstock.db.pool import Store


class Node:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def health(self, request: Request, body: bytes) -> Response:
        """Raises Unavailable while Postgres is away."""
        async with self._store.session() as session:
            await session.fetch("read_clock")
        address = f"{request.url.scheme}://{request.url.netloc}"
        stats = {"state": "Leader", "num_peers": "0", "backend": "postgres"}
        return answer({"leaderAddress": address, "leaderId": "1", "raftStats": stats})

    async def accepted(self, request: Request, body: bytes) -> Response:
        """What concerns the node that is asked, and has no effect: jobs are fired by the supervisors."""
        return answer(None, 202)
