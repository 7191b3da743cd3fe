"""clockwork's schedules in Postgres: created at once, so that a cancel that comes right after finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.compat import delayed_records
from penstock.compat.clockwork.schedules import SOURCE, CancelRequest, identity_of
from penstock.compat.delayed_records import DelayedRecord
from penstock.db.session import Session
from penstock.runtime import metrics

SameKey = Literal["keep", "reject"]


async def create_schedules(session: Session, wanted: Sequence[DelayedRecord], *, same_key: SameKey) -> list[bool]:
    """Store delayed records, inside a transaction; returns for each whether it is stored, now or before.

    same_key: whether a record of a known key with other contents is stored too or rejected.
    """
    chosen = {(one.key, one.variant): one for one in wanted}
    if same_key == "reject":
        keys = [one.key for one in wanted]
        await session.fetch("lock_delayed_record_keys", [SOURCE] * len(keys), keys)
        taken = {row["key"]: row["variant"] for row in await session.fetch("find_delayed_records", SOURCE, keys)}
        for one in wanted:
            if taken.setdefault(one.key, one.variant) != one.variant:
                chosen.pop((one.key, one.variant), None)
        metrics.DELAYED_RECORD_CHANGES.labels(SOURCE, "refused").inc(
            sum((one.key, one.variant) not in chosen for one in wanted)
        )
    await delayed_records.put(session, list(chosen.values()), replaces=False)
    return [(one.key, one.variant) in chosen for one in wanted]


async def cancel_schedule(session: Session, request: CancelRequest) -> bool:
    """Cancel every record of the pair; False if it has none."""
    return bool(await delayed_records.cancel(session, SOURCE, [identity_of(request.client_id, request.schedule_key)]))
