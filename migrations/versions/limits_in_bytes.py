"""Bytes: names and keys within the limits of the api, and room for an encrypted result of the highest limit."""

from __future__ import annotations

from alembic import op

revision = "limits_in_bytes"
down_revision = "output"
branch_labels = None
depends_on = None


_BYTES = (
    "\n                        when octet_length(word) > {0}"
    "\n                            then format('has %s bytes in UTF-8; the limit is {0}', octet_length(word))"
)
_CHECKED = {
    "characters long; the limit is 200', length(word))": 600,
    "must have 1 to 500 characters, not %s', length(word))": 1500,
    "must have 1 to 128 characters, not %s', length(word))": 384,
}
_CHANGES = [  # of functions: a text of each, and what it becomes
    *(("penstock.enqueue_tasks", known, known + _BYTES.format(most)) for known, most in _CHECKED.items()),
    # 900,000 bytes, encrypted and as Base64.
    ("public.penstock_settle", "262144')::int, 2), 900000)", "262144')::int, 2), 1201000)"),
]


def _replace(function: str, old: str, new: str) -> None:
    op.execute(
        f"do $do$ begin execute replace(pg_get_functiondef('{function}'::regproc), $old${old}$old$, $new${new}$new$); "
        "end $do$"
    )


def upgrade() -> None:
    for function, old, new in _CHANGES:
        _replace(function, old, new)


def downgrade() -> None:
    for function, old, new in _CHANGES:
        _replace(function, new, old)
