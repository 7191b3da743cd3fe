"""The schema of the first release. Its statements are in migrations/initial, one file a subject."""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

revision = "initial"
down_revision = None
branch_labels = None
depends_on = None

_FOLDER = Path(__file__).parents[1] / "initial"
_SUBJECTS = ("tasks", "history", "enqueue", "limits", "schedules", "workflows", "access", "compat")
# Up to a semicolon outside of comments, texts and bodies of functions.
_STATEMENT = re.compile(r"(?:--[^\n]*|'[^']*'|(\$\w*\$).*?\1|[^;])+;", re.DOTALL)

# Partitions and tables beside them are made later, so everything is found by its schema.
_DROP_ALL = """
do $do$
declare
    one text;
begin
    -- All names first: that of a partition which went with its table would be read as a number.
    foreach one in array array(
        select oid::regclass::text from pg_class
        where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p') and relname <> 'alembic_version')
    loop
        execute format('drop table if exists %s cascade', one);
    end loop;
    foreach one in array array(
        select oid::regprocedure::text from pg_proc
        where pronamespace = 'penstock'::regnamespace
           or (pronamespace = 'public'::regnamespace
               and proname in ('penstock_enqueue', 'penstock_enqueue_many', 'penstock_note_trace')))
    loop
        execute format('drop function if exists %s cascade', one);
    end loop;
end $do$
"""


def upgrade() -> None:
    for subject in _SUBJECTS:
        for statement in _STATEMENT.finditer((_FOLDER / f"{subject}.sql").read_text("utf-8")):
            op.execute(statement[0].strip().removesuffix(";"))


def downgrade() -> None:
    op.execute(_DROP_ALL)
    op.execute("drop sequence penstock.claim_seq, penstock.task_id_seq")
    op.execute("drop type penstock.task_state")
