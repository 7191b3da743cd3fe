"""The pytest plugin: fixtures. Their modules are imported when a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from penstock.protocol import in_process
from penstock.protocol.errors import needing

if TYPE_CHECKING:
    from penstock.local.postgres import EmbeddedPostgres
    from penstock.testing.inline import Inline
    from penstock.testing.pipeline import Pipeline


@pytest.fixture
def penstock_inline(monkeypatch: pytest.MonkeyPatch) -> Inline:
    """Records the tasks that this test enqueues, and runs them with `drain()`; no database, queue or api is needed."""
    with needing("the fixture penstock_inline", "server"):
        from penstock.testing.inline import Inline

    inline = Inline()
    monkeypatch.setattr(in_process, "substitute", inline)
    return inline


@pytest.fixture(scope="session")
def penstock_postgres() -> Iterator[EmbeddedPostgres]:
    """The embedded Postgres of the run; `pip install "penstock[local]"` has it."""
    with needing("the fixture penstock_pipeline", "local"):
        from penstock.testing.database import running_server

    with running_server() as server:
        yield server


@pytest.fixture
def penstock_pipeline(penstock_postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """All processes over a database of this test, with queues in memory; `drain()` runs their passes."""
    from penstock.testing.database import database_of_test, set_offset
    from penstock.testing.pipeline import Pipeline

    with database_of_test(penstock_postgres) as name:
        pipeline = Pipeline(penstock_postgres.dsn(name), partial(set_offset, penstock_postgres, name))
        monkeypatch.setattr(in_process, "substitute", pipeline)
        yield pipeline
