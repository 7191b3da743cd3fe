"""Jobs: tasks in this worker's hands, from their message to their answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.protocol.requests import ClaimId
from penstock.protocol.task_traces import CarriedTrace
from penstock.worker.handlers.actions import Handler
from penstock.worker.handlers.cancellation import Cancellation
from penstock.worker.handlers.context import Context
from penstock.worker.leases import Held
from penstock.worker.threads import Call

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import Attempt


class Job:
    """A task in this worker's hands.

    params: raw JSON, of a batched handler fitted once it has joined a batch; from then on ``started_at`` counts too.
    limit_seconds: how long it may run; until it starts, what its message says, None where it says nothing.
    seen_at: when this worker last gave a sign of it. overdue: it was stopped for its limit. cut: for the end of the
    process. where: the stack at which it was stopped. cancellation: what tells its handler that it is lost. spawned:
    the tasks that go with its result. carried: its trace, if any; attempt: its span, once it
    runs. tenant: whose task it is, None for none. report_progress: called from whichever thread the handler runs in.
    """

    __slots__ = (
        "answered", "attempt", "call", "cancellation", "carried", "claim", "claim_id", "cut", "deadline", "handler",
        "held", "limit_seconds", "overdue", "params", "ran_seconds", "report_progress", "seen_at", "spawned",
        "started_at", "task", "tenant", "where",
    )  # fmt: skip

    def __init__(
        self,
        claim_id: str,
        claim: ClaimId,
        handler: Handler,
        params: Any,
        held: Held,
        limit_seconds: float | None,
        report_progress: Callable[[Job, float | None, str | None], None],
    ) -> None:
        self.claim_id = claim_id
        self.claim = claim
        self.handler = handler
        self.params = params
        self.held = held
        self.limit_seconds = limit_seconds
        self.report_progress = report_progress
        self.seen_at = held.received_at
        self.started_at = 0.0
        self.ran_seconds = 0.0
        self.where: str | None = None
        self.deadline = math.inf
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None
        self.overdue = False
        self.cut = False
        self.answered = False
        self.cancellation = Cancellation()
        self.spawned: list[str] = []
        self.carried: CarriedTrace | None = None
        self.attempt: Attempt | None = None
        self.tenant: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its claim holds no more, so that its answer would change nothing."""
        return self.cancellation.is_set

    @property
    def received_at(self) -> float:
        """When its message was received."""
        return self.held.received_at

    def context(self) -> Context:
        """What its handler is given."""
        claim = self.claim
        redelivered = self.held.message.receive_count > 1
        return Context(
            claim.task_id, claim.claim, self.handler.name, redelivered, self.report, self.cancellation, self.spawned,
            self.tenant,
        )  # fmt: skip

    def report(self, percent: float | None, note: str | None) -> None:
        """Progress from the handler, from whichever thread it runs in."""
        self.report_progress(self, percent, note)
