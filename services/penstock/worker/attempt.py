"""An attempt: a task in this worker, from its message to its response."""

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
from penstock.worker.leases import Lease
from penstock.worker.threads import Call

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import AttemptSpan


class Attempt:
    """One attempt of a task by this worker.

    params: raw JSON; of a batched handler, decoded when it joins a batch, and ``started_at`` counts from then.
    limit_seconds: run time; before the start, the message's own limit or None. seen_at: last heartbeat.
    overdue: stopped at its time limit. cut: stopped with the process. where: the stack at which it was stopped.
    spawned: tasks that go with its result. carried: trace context of the message; span: set at the start.
    report_progress: called in the handler's thread.
    """

    __slots__ = (
        "answered", "call", "cancellation", "carried", "claim", "claim_id", "cut", "deadline", "handler",
        "lease", "limit_seconds", "overdue", "params", "ran_seconds", "report_progress", "seen_at", "span", "spawned",
        "started_at", "task", "tenant", "where",
    )  # fmt: skip

    def __init__(
        self,
        claim_id: str,
        claim: ClaimId,
        handler: Handler,
        params: Any,
        lease: Lease,
        limit_seconds: float | None,
        report_progress: Callable[[Attempt, float | None, str | None], None],
    ) -> None:
        self.claim_id = claim_id
        self.claim = claim
        self.handler = handler
        self.params = params
        self.lease = lease
        self.limit_seconds = limit_seconds
        self.report_progress = report_progress
        self.seen_at = lease.received_at
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
        self.span: AttemptSpan | None = None
        self.tenant: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its claim has ended, so that the response would be ignored."""
        return self.cancellation.is_set

    @property
    def received_at(self) -> float:
        """When its message was received."""
        return self.lease.received_at

    def context(self) -> Context:
        """The context for the handler."""
        claim = self.claim
        redelivered = self.lease.message.receive_count > 1
        return Context(
            claim.task_id, claim.claim, self.handler.name, redelivered, self.report, self.cancellation, self.spawned,
            self.tenant,
        )  # fmt: skip

    def report(self, percent: float | None, note: str | None) -> None:
        """Report progress, from the handler's thread."""
        self.report_progress(self, percent, note)
