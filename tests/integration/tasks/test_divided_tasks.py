"""The life of tasks over a divided table; `TEST_PARTITIONS=4 make test` runs all other tests so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.local.postgres import EmbeddedPostgres
from tests.conftest import PARTITIONS
from tests.integration.tasks.test_expiry_and_order import (
    test_a_held_key_goes_on_when_the_failed_task_is_retried_and_succeeds as test_a_held_key,
)
from tests.integration.tasks.test_expiry_and_order import (
    test_expiry_takes_what_waits_and_leaves_what_runs_until_it_stops as test_expiry,
)
from tests.integration.tasks.test_expiry_and_order import (
    test_reschedule_moves_what_waits_and_refuses_the_rest as test_reschedule,
)
from tests.integration.tasks.test_state_machine import (
    test_no_statement_touches_a_task_by_an_older_claim as test_older_claims,
)
from tests.partitions import divide
from tests.postgres_versions import COPY_FILES

__all__ = ["test_a_held_key", "test_expiry", "test_older_claims", "test_reschedule"]

pytestmark = pytest.mark.skipif(PARTITIONS > 1, reason="all tests run so")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def divided_template(postgres: EmbeddedPostgres, template_database: str) -> Iterator[str]:
    postgres.create_database("divided_template", template=template_database)
    divide(postgres, "divided_template", 4)
    yield "divided_template"
    postgres.drop_database("divided_template")


@pytest.fixture
def database_url(
    postgres: EmbeddedPostgres, administration: psycopg.Connection[Any], divided_template: str
) -> Iterator[str]:
    """As the one of all tests, with four partitions."""
    name = f"divided_{next(_numbers)}"
    administration.execute(f"create database {name} template {divided_template} {COPY_FILES}")
    yield postgres.dsn(name)
    administration.execute(f"drop database if exists {name} with (force)")
