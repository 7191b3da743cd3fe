"""Statements, migrations and names for a schema of another name."""

from __future__ import annotations

import re

import pytest

from penstock.db.migrate import grants, upgrade_sql
from penstock.db.notify import CHANNEL, DELAYED_RECORDS, OUTPUT, WORKFLOWS
from penstock.db.statements import SQL
from penstock.protocol.errors import SettingsError
from penstock.protocol.schema import PREFIXED, renamed
from penstock.settings.model import load_settings
from penstock.tasks import transactional

# Where the name stays: parameters that programs set, names of connections, commands and texts for people.
STAYS = re.compile(
    r"'penstock\.(notify|max_attempts|\w+_limit_bytes)\b|set penstock\.\w+_limit_bytes|'\^?penstock-|`penstock |"
    r"\"penstock\\?\+|--[^\n]*"
)


def left(text: str) -> list[str]:
    return [line for line in STAYS.sub("", text).splitlines() if "penstock" in line]


@pytest.mark.parametrize("name", SQL)
def test_a_statement_names_no_other_schema(name: str) -> None:
    assert left(renamed(SQL[name], "orders")) == []
    assert renamed(SQL[name], "penstock") is SQL[name]
    begun = renamed(SQL[name], "penstock_staging")
    assert renamed(begun, "penstock_staging") == begun
    assert begun.replace("penstock_staging", "orders") == renamed(SQL[name], "orders")


def test_migrations_and_grants_name_no_other_schema() -> None:
    migrations = upgrade_sql(schema="orders")
    assert left(migrations) == []
    assert upgrade_sql(schema="penstock_staging").replace("penstock_staging", "orders") == migrations
    assert left("\n".join(grants("api", ["api", "supervisor"], schema="orders")).replace("$penstock$", "")) == []


def test_grants_name_the_role_as_it_is() -> None:
    statements = grants("penstock_app", ["supervisor"], schema="orders")
    assert all("penstock_app" in statement and "orders_app" not in statement for statement in statements)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select * from penstock.task", "select * from s.task"),
        ("format('penstock.%I', x)", "format('s.%I', x)"),
        ("'penstock.' || x", "'s.' || x"),
        ("n.nspname = 'penstock'", "n.nspname = 's'"),
        ("in schema penstock to x", "in schema s to x"),
        ("hashtext('penstock upkeep')", "hashtext('s upkeep')"),
        ("pg_notify('penstock_' || substr($1, 10), '')", "pg_notify('s_' || substr($1, 10), '')"),
        ("public.penstock_enqueue", "public.s_enqueue"),
        ("current_setting('penstock.notify', true)", "current_setting('penstock.notify', true)"),
        ("'penstock.result_limit_bytes is the limit.'", "'penstock.result_limit_bytes is the limit.'"),
        ("application_name like 'penstock-%'", "application_name like 'penstock-%'"),
        ("my_penstock.task, otherpenstock_x", "my_penstock.task, otherpenstock_x"),
    ],
)
def test_names_are_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert renamed(text, "s") == expected


@pytest.mark.parametrize(
    "name",
    [
        "public",
        "pg_tasks",
        "information_schema",
        "Orders",
        "a b",
        'a"b',
        "1a",
        "",
        "a" * 32,
        "penstock_enqueue",
        "penstock_note",
        "penstock_work",
    ],
)
def test_a_name_that_needs_quotes_or_is_taken_is_no_schema(name: str) -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_DATABASE_SCHEMA"):
        load_settings(database_schema=name)


def test_the_functions_of_programs_are_those_of_the_schema() -> None:
    assert "public.orders_enqueue_many(" in renamed(transactional._STATEMENTS["enqueue"], "orders")
    assert renamed(transactional._GRANTED["settle"], "orders") == "orders_settle"


@pytest.mark.parametrize("name", ["penstock_staging", "penstock_workers", "penstock_2", "penstock2", "my_penstock"])
def test_a_name_that_the_text_has_already_is_kept(name: str) -> None:
    assert load_settings(database_schema=name).database_schema == name
    for text, expected in (
        ("create schema if not exists penstock_x", "create schema if not exists penstock_x"),
        ("select * from penstock_x.alembic_version", "select * from penstock_x.alembic_version"),
        ('LISTEN "penstock_work"', 'LISTEN "penstock_x_work"'),
        ("pg_notify('penstock_' || $1)", "pg_notify('penstock_x_' || $1)"),
    ):
        once = renamed(text.replace("penstock_x", name), name)
        assert once == expected.replace("penstock_x", name)
        assert renamed(once, name) == once


def test_no_function_or_channel_can_be_the_name_of_a_schema() -> None:
    texts = [*SQL.values(), upgrade_sql(), CHANNEL, WORKFLOWS, OUTPUT, DELAYED_RECORDS]
    assert {name for text in texts for name in re.findall(r"\bpenstock_([a-z_]+)", text)} == set(PREFIXED)
