"""Tasks that wait for an outside event, and answers to them that are kept until their task waits."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# A WAITING task that was never claimed stands behind its ordering key or its predecessors; one that was waits for an
# event, and keeps the instant of its claim. So nothing is added to the row that every other task has too.
_OLD_CHECKS = {
    "task_claimed_at_iff_acquired": "(state = 'ACQUIRED') = (claimed_at is not null)",
    "task_attempts_fit_state": """
        case state when 'ACQUIRED' then attempts > 0
                   when 'ERROR' then attempts > 0 and attempts < max_attempts
                   else attempts = 0 end""",
    "task_claimed_has_token": "state <> 'ACQUIRED' or claim > 0",
    "task_waiting_has_key": "state <> 'WAITING' or ordering_key is not null or workflow is not null",
}
_CHECKS = {
    "task_claimed_at_iff_acquired": """
        (state = 'ACQUIRED' or (state = 'WAITING' and attempts > 0)) = (claimed_at is not null)""",
    "task_attempts_fit_state": """
        case state when 'ACQUIRED' then attempts > 0
                   when 'ERROR' then attempts > 0 and attempts < max_attempts
                   when 'WAITING' then true
                   else attempts = 0 end""",
    "task_claimed_has_token": "claimed_at is null or claim > 0",
    "task_waiting_has_key": "state <> 'WAITING' or ordering_key is not null or workflow is not null or attempts > 0",
}

UPGRADE = [
    *(f"alter table penstock.task drop constraint {name}" for name in _OLD_CHECKS),
    *(f"alter table penstock.task add constraint {name} check ({check})" for name, check in _CHECKS.items()),
    "drop index penstock.task_expiring",
    "create index task_expiring on penstock.task (expires_at) where expires_at is not null and claimed_at is null",
    """
    create table penstock.wait (
        token      text primary key,
        task_id    bigint,
        claim      bigint,
        deadline   timestamptz,
        policy     jsonb,
        answer     text,
        digest     bytea,
        updated_at timestamptz not null default now(),
        constraint wait_names_claim check ((task_id is null) = (claim is null)),
        constraint wait_is_active_or_answered check (deadline is null or (task_id is not null and answer is null)),
        constraint wait_keeps_what_it_knows check (answer is null or digest is not null)
    )
    """,
    "create index wait_deadline on penstock.wait (deadline) where deadline is not null",
    "create index wait_task on penstock.wait (task_id) where task_id is not null",
    "create index wait_ended on penstock.wait (updated_at) where deadline is null",
    "comment on table penstock.wait is "
    "'Tokens that tasks wait for or have waited for, and answers that came before their task waited'",
    "comment on column penstock.wait.task_id is 'The task that waits or waited; null for an answer that is kept'",
    "comment on column penstock.wait.deadline is 'Until when it waits; null: it does not, or no more'",
    "comment on column penstock.wait.policy is 'How its failure is retried, as the worker told: see wire.Hints'",
    "comment on column penstock.wait.answer is 'A member of a JSON-RPC response, result or error, until a task waits'",
    "comment on column penstock.wait.digest is 'SHA-256 of the answer, by which one that comes twice is known'",
]

DOWNGRADE = [
    # What waits for an event is given back, as if it had never been sent; its attempt is not counted.
    """
    update penstock.task
    set state = case when attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = attempts - 1, claimed_at = null, updated_at = now()
    where state = 'WAITING' and claimed_at is not null
    """,
    "drop table penstock.wait",
    "drop index penstock.task_expiring",
    "create index task_expiring on penstock.task (expires_at) where expires_at is not null and state <> 'ACQUIRED'",
    *(f"alter table penstock.task drop constraint {name}" for name in _CHECKS),
    *(f"alter table penstock.task add constraint {name} check ({check})" for name, check in _OLD_CHECKS.items()),
]


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
