"""`penstock credential`: made, listed and archived in the database."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.compat.scheduler0.store import find_credential
from penstock.db.pool import Store
from penstock.protocol.errors import PenstockError


def run(database_url: str, *arguments: str) -> tuple[str, str]:
    """Standard output and error."""
    done = CliRunner().invoke(app, ["credential", *arguments, "--database-url", database_url], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def is_let_in(database_url: str, api_key: str, secret: str) -> bool:
    async def ask() -> bool:
        store = Store(database_url, pool_size=1)
        try:
            async with store.session() as session:
                return await find_credential(session, api_key, secret) is not None
        finally:
            await store.close()

    return asyncio.run(ask())


def test_a_credential_is_made_listed_and_archived(database_url: str) -> None:
    out, err = run(database_url, "create")
    key, secret = (line.partition("=")[2] for line in out.splitlines())
    assert "PENSTOCK_SCHEDULER0=true" in err  # where the api runs it must be set
    assert is_let_in(database_url, key, secret)
    assert not is_let_in(database_url, key, key)

    made = json.loads(run(database_url, "create", "--json")[0])
    assert made.keys() == {"id", "apiKey", "apiSecret", "archived", "dateCreated"}
    listed = json.loads(run(database_url, "list", "--json")[0])
    assert [(one["id"], one["archived"]) for one in listed] == [(2, False), (1, False)]
    assert secret not in run(database_url, "list")[0]

    assert key in run(database_url, "archive", "1")[0]
    assert not is_let_in(database_url, key, secret)
    assert is_let_in(database_url, made["apiKey"], made["apiSecret"])
    assert json.loads(run(database_url, "archive", "2", "--json")[0])["archived"] is True
    with pytest.raises(PenstockError, match="no credential 9"):
        run(database_url, "archive", "9")
