"""One token for all tasks of a claim, suspects that travel alone, run times beside the counts."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UPGRADE = [
    # What an older scheduler has claimed and not confirmed can be told by its arrays only, which go: given back now.
    """
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, claimed_at = null, heartbeat_at = null, updated_at = now()
    from (select unnest(task_ids) as id, unnest(claims) as claim from penstock.dispatch) d
    where t.id = d.id and t.claim = d.claim and t.state::text = 'ACQUIRED'
    """,
    "delete from penstock.dispatch",
    "alter table penstock.dispatch drop column task_ids, drop column claims, alter column id drop identity",
    "alter table penstock.task add column suspect boolean not null default false",
    "alter table penstock.tally add column seconds double precision not null default 0",
    "comment on column penstock.task.claim is "
    "'Token of the newest claim, from claim_seq, shared by all that one statement claimed; grows and never falls'",
    "comment on column penstock.task.suspect is 'A worker fell silent with it: from now on it is sent alone'",
    "comment on table penstock.dispatch is "
    "'Claims whose sending is not yet confirmed, by their token; what a row left over names is released'",
    "comment on column penstock.tally.seconds is 'Run time of the counted attempts, for the event RAN'",
]

DOWNGRADE = [
    "delete from penstock.tally where event = 'RAN'",
    "alter table penstock.tally drop column seconds",
    "alter table penstock.task drop column suspect",
    """
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1, claimed_at = null, heartbeat_at = null, updated_at = now()
    from penstock.dispatch d
    where t.claim = d.id and t.state::text = 'ACQUIRED'
    """,
    "delete from penstock.dispatch",
    "alter table penstock.dispatch alter column id add generated always as identity, "
    "add column task_ids bigint[] not null, add column claims bigint[] not null",
    "comment on column penstock.task.claim is 'Token of the newest claim, from claim_seq; grows and never falls'",
    "comment on table penstock.dispatch is 'Claims whose sending is not yet confirmed; a row left over is released'",
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
