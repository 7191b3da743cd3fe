"""Payloads of tasks enqueued inside a transaction may hold numbers beyond a double, as others may."""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_BEFORE = r"""
create or replace function penstock.payload_problem(value json) returns text language plpgsql as $$
declare
    body constant text := value::text;
    read constant jsonb := value::jsonb;
begin
    if jsonb_typeof(read) not in ('object', 'array') then
        return 'must be an object or an array, not '
            || case jsonb_typeof(read) when 'null' then 'null' else 'a ' || jsonb_typeof(read) end;
    end if;
    if body ~ '[eE]\+?\d{3}|\d{255}' and jsonb_path_exists(
            read, 'strict $.** ? (@.type() == "number" && (@ > 1.7976931348623157e308 || @ < -1.7976931348623157e308))')
    then
        return 'holds a number out of range';
    end if;
    if length(body) - length(translate(body, '{[', '')) > 100 and jsonb_path_exists(
            read, 'strict $.**{100} ? (@.type() == "object" || @.type() == "array")') then
        return 'is nested deeper than 100 levels';
    end if;
    return null;
end $$
"""
# jsonb holds numbers of 131,072 digits, so exponents are left out of what is looked at; strings stay as they are.
_AFTER = r"""
create or replace function penstock.payload_problem(value json) returns text language plpgsql as $$
declare
    body constant text := value::text;
    read constant jsonb := case when body ~ '[eE][+-]?\d{3}'
        then regexp_replace(body, '("(?:[^"\\]|\\.)*")|(\d)[eE][+-]?\d+', '\1\2', 'g')::jsonb else value::jsonb end;
begin
    if jsonb_typeof(read) not in ('object', 'array') then
        return 'must be an object or an array, not '
            || case jsonb_typeof(read) when 'null' then 'null' else 'a ' || jsonb_typeof(read) end;
    end if;
    if length(body) - length(translate(body, '{[', '')) > 100 and jsonb_path_exists(
            read, 'strict $.**{100} ? (@.type() == "object" || @.type() == "array")') then
        return 'is nested deeper than 100 levels';
    end if;
    return null;
end $$
"""


def upgrade() -> None:
    op.execute(_AFTER)


def downgrade() -> None:
    op.execute(_BEFORE)
