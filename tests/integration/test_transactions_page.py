"""docs/transactions.md is run, example by example, in its order, on an empty database."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "transactions.md").read_text("utf-8")


async def test_every_example_of_the_transactions_page_runs(
    database_url: str, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    await sql.execute("drop role if exists app")
    blocks = re.findall(r"^```(python|sql)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") == 3
    try:
        for kind, text in blocks:
            if kind == "python":
                await asyncio.to_thread(exec, compile(text, "docs/transactions.md", "exec"), {})
            else:
                await sql.execute(text)
    finally:
        await sql.execute("drop owned by app")
        await sql.execute("drop role app")
    rows = await sql.fetch(
        "select action, state::text, payload ->> 'order', unique_key from penstock.task"
        " where action <> 'audit' order by id"
    )
    assert [tuple(row) for row in rows] == [
        ("ship", "SCHEDULED", "1", "1"), ("ship", "SCHEDULED", "2", None), ("ship", "WAITING", "3", None),
        ("remind", "SCHEDULED", "4", None), ("export", "SCHEDULED", None, None), ("sync", "SCHEDULED", None, "7"),
        ("export", "SCHEDULED", None, None), ("ship", "SCHEDULED", "4", "4"),
    ]  # fmt: skip
    told = await sql.fetch("select tenant, trace from penstock.task where action = 'export' order by id")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 rojo=1"
    assert [tuple(row) for row in told] == [(None, None), ("acme", trace)]
    assert await sql.fetchval("select count(*) from penstock.task where action = 'audit' and tenant = 'acme'") == 4
    task = await sql.fetchrow("select priority, labels::text, run_at > now() as later from penstock.task where id = 1")
    assert tuple(task) == (5, None, False)


async def test_the_arguments_on_the_page_are_those_of_the_function(sql: Any) -> None:
    named = set(re.findall(r"`\"?(\w+)\"?`", "".join(re.findall(r"^\| (`.*?`) \| `", PAGE, re.MULTILINE))))
    arguments = await sql.fetchval("select proargnames[1:pronargs] from pg_proc where proname = 'penstock_enqueue'")
    assert set(arguments) <= named
