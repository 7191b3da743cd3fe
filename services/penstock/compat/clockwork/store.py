"""clockwork's schedules in Postgres: created at once, so that a cancel that comes right after finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.compat.clockwork.schedules import SOURCE, CancelRequest, identity_of
from penstock.compat.delayed_records import Armed, arm, disarm
from penstock.db.session import Session
from penstock.runtime import metrics

SameKey = Literal["keep", "reject"]


async def create_schedules(session: Session, wanted: Sequence[Armed], *, same_key: SameKey) -> list[bool]:
    """Arm these, inside a transaction; for each whether it is armed now, by this or since before.

    same_key: whether another one of a key that is armed already, with other contents, is kept beside it or rejected.
    """
    chosen = {(one.key, one.variant): one for one in wanted}
    if same_key == "reject":
        keys = [one.key for one in wanted]
        await session.fetch("lock_armed_keys", [SOURCE] * len(keys), keys)
        taken = {row["key"]: row["variant"] for row in await session.fetch("find_armed", SOURCE, keys)}
        for one in wanted:
            if taken.setdefault(one.key, one.variant) != one.variant:
                chosen.pop((one.key, one.variant), None)
        metrics.ARMED_CHANGES.labels(SOURCE, "refused").inc(sum((one.key, one.variant) not in chosen for one in wanted))
    await arm(session, list(chosen.values()), replaces=False)
    return [(one.key, one.variant) in chosen for one in wanted]


async def cancel_schedule(session: Session, request: CancelRequest) -> bool:
    """Call off everything that the pair has armed; False where there is nothing."""
    return bool(await disarm(session, SOURCE, [identity_of(request.client_id, request.schedule_key)]))
