"""Keys of claim ids: a result settles only a task that its sender was given."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

UPGRADE = [
    """
    create table penstock.claim_key (
        id             bigint generated always as identity primary key,
        secret         bytea,
        signs_from     timestamptz not null default now(),
        accepted_until timestamptz
    )
    """,
    "comment on table penstock.claim_key is 'What the tokens of claim ids are made by; of several the newest'",
    "comment on column penstock.claim_key.secret is 'Null: claim ids without a token are accepted'",
    # A worker of the version before does not read an id with a token, and its scheduler makes none. Where there were
    # claims before, tokens begin after a week, and ids without one are accepted for as long as SQS may keep a message.
    """
    insert into penstock.claim_key (secret, signs_from)
    select sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
           case when is_called then now() + interval '7 days' else now() end
    from penstock.claim_seq
    """,
    """
    insert into penstock.claim_key (accepted_until)
    select now() + interval '21 days' from penstock.claim_seq where is_called
    """,
]

DOWNGRADE = ["drop table penstock.claim_key"]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
