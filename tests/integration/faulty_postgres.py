"""A Postgres that refuses, cuts and forgets to answer, on demand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TRIGGER = """
create table public.fault (code text not null, place text not null, tbl text not null, action text);
create function public.strike() returns trigger language plpgsql as $$
declare
    wanted text;
begin
    select code into wanted from public.fault where place = tg_argv[0] and tbl = tg_argv[1] and action is null;
    if wanted = 'kill' then
        perform pg_terminate_backend(pg_backend_pid());
        perform pg_sleep(10);
    elsif wanted is not null then
        raise exception 'made to fail' using errcode = wanted;
    end if;
    return null;
end $$;
create function public.strike_row() returns trigger language plpgsql as $$
declare
    wanted text;
    mine text := case tg_op when 'DELETE' then old.action else new.action end;
begin
    select code into wanted from public.fault where place = tg_argv[0] and tbl = tg_argv[1] and action = mine;
    if wanted is not null then
        raise exception 'made to fail' using errcode = wanted;
    end if;
    return case tg_op when 'DELETE' then old else new end;
end $$;
"""


class Refusals:
    """Statements and commits that change a table fail with a code of Postgres; ``kill`` ends the connection instead.

    A rejected commit is really rejected: the error comes from a deferred constraint.
    """

    def __init__(self, sql: Any) -> None:
        self._sql = sql

    async def install(self) -> None:
        await self._sql.execute(_TRIGGER)
        for table in ("task", "dispatch"):
            await self._sql.execute(
                f"create trigger a_statement before insert or update or delete on penstock.{table} "
                f"for each statement execute function public.strike('statement', '{table}')"
            )
            await self._sql.execute(
                f"create constraint trigger a_commit after insert or update or delete on penstock.{table} "
                f"deferrable initially deferred for each row execute function public.strike('commit', '{table}')"
            )
        await self._sql.execute(
            "create trigger a_row before insert or update or delete on penstock.task "
            "for each row execute function public.strike_row('statement', 'task')"
        )
        await self._sql.execute(
            "create constraint trigger a_row_commit after insert or update or delete on penstock.task "
            "deferrable initially deferred for each row execute function public.strike_row('commit', 'task')"
        )

    async def begin(self, code: str, place: str, *, table: str = "task", action: str | None = None) -> None:
        """From now on fail with that code; ``action``: only what touches tasks of that action."""
        await self._sql.execute("insert into public.fault values ($1, $2, $3, $4)", code, place, table, action)

    async def end(self) -> None:
        await self._sql.execute("delete from public.fault")

    @asynccontextmanager
    async def during(self, code: str, place: str, **more: Any) -> AsyncIterator[None]:
        await self.begin(code, place, **more)
        try:
            yield
        finally:
            await self.end()


_PARSED = re.compile(rb"P.{4}(__asyncpg_stmt_[0-9a-f]+__)\x00(.*?)\x00", re.DOTALL)


@dataclass
class PostgresProxy:
    """Stands between the driver and Postgres. Once ``lose`` is set, the reply to the next thing of that kind is lost:
    Postgres does it, then the connection is cut. A kind is ``commit``, or a text of a statement that ran before.
    """

    url: str = ""
    lose: str | None = None
    lost: int = 0
    _texts: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    def is_meant(self, connection: int, chunk: bytes) -> bool:
        for match in _PARSED.finditer(chunk):
            self._texts[connection, match[1]] = match[2]
        if self.lose is None:
            return False
        if self.lose == "commit":
            return b"COMMIT" in chunk
        runs = (text for (of, name), text in self._texts.items() if of == connection and name + b"\0" in chunk)
        return b"B" in chunk and any(self.lose.encode() in text for text in runs)


@asynccontextmanager
async def postgres_proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    """Run a proxy before the database; ``url`` leads through it."""
    parts = urlsplit(database_url)
    proxy = PostgresProxy()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection(parts.hostname, parts.port)
        writers.extend((writer, upstream))
        cut = asyncio.Event()

        async def to_server() -> None:
            while chunk := await reader.read(65_536):
                if proxy.is_meant(id(writer), chunk):
                    proxy.lose = None
                    proxy.lost += 1
                    cut.set()
                upstream.write(chunk)

        async def to_client() -> None:
            while chunk := await upstream_reader.read(65_536):
                # Each reply ends with ReadyForQuery: then it is done, and the client does not learn it.
                if cut.is_set() and chunk[-6:-1] == b"Z\x00\x00\x00\x05":
                    return
                if not cut.is_set():
                    writer.write(chunk)

        sides = [asyncio.ensure_future(to_server()), asyncio.ensure_future(to_client())]
        await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        for side in sides:
            side.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        writer.close()
        upstream.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    login = parts.netloc.rpartition("@")[0]
    proxy.url = parts._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
    try:
        yield proxy
    finally:
        server.close()
        for writer in writers:
            writer.close()
