"""Messages as a scheduler packs them, under bounds that a test gives."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from penstock.brokers.base import Limits
from penstock.protocol.fence import Fence
from penstock.protocol.task import Claimed
from penstock.scheduler import sending
from penstock.scheduler.sending import PackedMessage


def pack_messages(
    tasks: Sequence[Claimed], run_seconds: Mapping[str, float], *, max_tasks: int, max_bytes: int, max_seconds: float,
    by_tenant: bool = False, fence: Fence | None = None,
) -> list[PackedMessage]:  # fmt: skip
    """by_tenant: each tenant's tasks travel apart."""
    settings: Any = SimpleNamespace(pack_max_tasks=max_tasks, pack_seconds=max_seconds, fair_queues=by_tenant)
    limits = Limits(max_bytes, max_call_messages=10, max_extend_seconds=3600, fair_groups=True)
    return sending.pack_messages(tasks, run_seconds, settings, limits, fence or Fence())
