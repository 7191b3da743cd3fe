"""Workflows from a program: a builder, and the methods over HTTP and through the inbound queue."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from penstock.protocol.errors import Unavailable
from penstock.protocol.requests import prepared

_END_STATES = ("SUCCESS", "FAILED", "CANCELLED")


class Step:
    """A step of a Workflow under construction."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.name = name
        self.members = members

    def after(self, *others: Step) -> Step:
        """Have it come after these too; returns it."""
        known = self.members.setdefault("after", [])
        known += [other.name for other in others if other.name not in known]
        return self


class Workflow:
    """Steps that come after each other, put together piece by piece and then given to ``client.workflows.create``.

    name: shown with it. key: the same key and definition again get the first workflow.
    """

    def __init__(self, name: str = "", *, key: str | None = None) -> None:
        self.name = name
        self.key = key
        self._steps: dict[str, Step] = {}
        self._numbers: dict[str, int] = {}

    def step(
        self,
        action: str,
        payload: Any = None,
        *,
        name: str | None = None,
        after: Step | Iterable[Step] = (),
        **options: Any,
    ) -> Step:
        """Add a step; named after its action, with a number where that is taken, unless a name is given.

        options: results_as, errors_as, on_failure, compensate, and those of ``enqueue`` but unique_key, unique and
        on_duplicate. Raises ValueError for a name that is taken.
        """
        members = {"action": action} | ({} if payload is None else {"payload": payload}) | prepared(options)
        return self._add(action.replace("/", "-") if name is None else name, name is None, members, after)

    def map(
        self,
        action: str,
        over: Step | Sequence[Any],
        payload: Any = None,
        *,
        item_as: str = "item",
        name: str | None = None,
        after: Step | Iterable[Step] = (),
        **options: Any,
    ) -> Step:
        """Add a step that runs the action once for each item of a list, or of the list that a step returns.

        Each task is given ``payload`` and its item as the member ``item_as``. What comes after it waits for all, and
        is given an array of their results. Otherwise as ``step``.
        """
        given = over.name if isinstance(over, Step) else list(over)
        return self.step(action, payload, name=name, after=after, over=given, item_as=item_as, **options)

    def join(self, *steps: Step, name: str | None = None) -> Step:
        """Add a step without a task, which is done when these are; what comes after it is given their results."""
        return self._add("join" if name is None else name, name is None, {}, steps)

    def chain(self, *links: Step | Sequence[Step]) -> None:
        """Have steps come one after the other; a sequence of steps stands for a group side by side."""
        before: Sequence[Step] = ()
        for link in links:
            group = (link,) if isinstance(link, Step) else tuple(link)
            if len(before) > 1 and len(group) > 1:
                before = (self.join(*before),)  # their widths add up, and do not multiply
            for step in group:
                step.after(*before)
            before = group

    def params(self) -> dict[str, Any]:
        """The parameters of ``workflow.create``."""
        steps = [{"name": step.name, **step.members} for step in self._steps.values()]
        key = {} if self.key is None else {"key": self.key}
        return {"steps": steps} | ({"name": self.name} if self.name else {}) | key

    def _add(self, name: str, may_number: bool, members: dict[str, Any], after: Step | Iterable[Step]) -> Step:
        free = name
        while may_number and free in self._steps:
            self._numbers[name] = self._numbers.get(name, 1) + 1
            free = f"{name}-{self._numbers[name]}"
        if free in self._steps:
            raise ValueError(f"a step named {name!r} is there already: give this one another name")
        step = self._steps[free] = Step(free, members)
        return step.after(*((after,) if isinstance(after, Step) else after))


class Workflows:
    """Workflows over HTTP. Every method raises as those of Client do; a workflow is named by its id, or by ``key=``
    and, where it is a tenant's, ``tenant=``."""

    def __init__(self, call: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._call = call

    def create(
        self, workflow: Workflow | None = None, *, chain: Sequence[Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        """Make a workflow: one that was built, or a ``chain`` or ``steps`` as the api takes them.

        Stored when this returns. Returns ``{"id", "state", "duplicate"}``. Raises WorkflowConflict for a key that is
        that of another definition, InvalidParams naming the step that is wrong.
        """
        answer: dict[str, Any] = self._call("workflow.create", _created(workflow, chain, params))
        return answer

    def status(
        self, workflow_id: int | None = None, *, key: str | None = None, limit: int = 100, cursor: str | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A workflow with counts by state and a page of its steps as ``tree``. Raises WorkflowNotFound."""
        answer: dict[str, Any] = self._call("workflow.status", _page_of(workflow_id, key, limit, cursor, tenant))
        return answer

    def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """A page of workflows, newest first: ``{"workflows", "cursor"}``."""
        answer: dict[str, Any] = self._call("workflow.list", _listed(state, limit, cursor, tenant))
        return answer

    def cancel(
        self, workflow_id: int | None = None, *, key: str | None = None, reason: str | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Cancel what has not ended. Raises WorkflowNotFound, WorkflowConflict."""
        answer: dict[str, Any] = self._call("workflow.cancel", _called_off(workflow_id, key, reason, tenant))
        return answer

    def retry(
        self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Begin again with the steps that have not succeeded. Raises WorkflowNotFound, WorkflowConflict."""
        answer: dict[str, Any] = self._call("workflow.retry", _which(workflow_id, key, tenant))
        return answer

    def wait(self, workflow_id: int, *, timeout: float | None = None, interval: float = 0.5) -> dict[str, Any]:
        """Wait until a workflow has ended and return it as ``status`` does.

        timeout: seconds, None for as long as it takes. interval: seconds between two looks. Raises Unavailable when
        the time is up.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            workflow = self.status(workflow_id, limit=1)
            if workflow["state"] in _END_STATES:
                return self.status(workflow_id)
            if deadline is not None and monotonic() >= deadline:
                raise _late(workflow, timeout)
            sleep(interval)


class AsyncWorkflows:
    """The same, of AsyncClient."""

    def __init__(self, call: Callable[[str, Mapping[str, Any]], Awaitable[Any]]) -> None:
        self._call = call

    async def create(
        self, workflow: Workflow | None = None, *, chain: Sequence[Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        """As of Workflows."""
        answer: dict[str, Any] = await self._call("workflow.create", _created(workflow, chain, params))
        return answer

    async def status(
        self, workflow_id: int | None = None, *, key: str | None = None, limit: int = 100, cursor: str | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """As of Workflows."""
        answer: dict[str, Any] = await self._call("workflow.status", _page_of(workflow_id, key, limit, cursor, tenant))
        return answer

    async def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """As of Workflows."""
        answer: dict[str, Any] = await self._call("workflow.list", _listed(state, limit, cursor, tenant))
        return answer

    async def cancel(
        self, workflow_id: int | None = None, *, key: str | None = None, reason: str | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """As of Workflows."""
        answer: dict[str, Any] = await self._call("workflow.cancel", _called_off(workflow_id, key, reason, tenant))
        return answer

    async def retry(
        self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """As of Workflows."""
        answer: dict[str, Any] = await self._call("workflow.retry", _which(workflow_id, key, tenant))
        return answer

    async def wait(self, workflow_id: int, *, timeout: float | None = None, interval: float = 0.5) -> dict[str, Any]:
        """As of Workflows."""
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            workflow = await self.status(workflow_id, limit=1)
            if workflow["state"] in _END_STATES:
                return await self.status(workflow_id)
            if deadline is not None and monotonic() >= deadline:
                raise _late(workflow, timeout)
            await asyncio.sleep(interval)


class InboundWorkflows:
    """The changes among them through the inbound queue, where no answer comes back."""

    def __init__(self, send: Callable[[str, Mapping[str, Any]], Awaitable[None]]) -> None:
        self._send = send

    async def create(
        self, workflow: Workflow | None = None, *, chain: Sequence[Any] | None = None, **params: Any
    ) -> None:
        """As of Workflows; give a key, for a send that timed out is tried again. One message holds it: up to 1 MiB."""
        await self._send("workflow.create", _created(workflow, chain, params))

    async def cancel(
        self, workflow_id: int | None = None, *, key: str | None = None, reason: str | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        """As of Workflows."""
        await self._send("workflow.cancel", _called_off(workflow_id, key, reason, tenant))

    async def retry(self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None) -> None:
        """As of Workflows."""
        await self._send("workflow.retry", _which(workflow_id, key, tenant))


def _created(workflow: Workflow | None, chain: Sequence[Any] | None, params: Mapping[str, Any]) -> dict[str, Any]:
    if workflow is not None:
        return workflow.params() | dict(params)
    return ({} if chain is None else {"chain": builtins.list(chain)}) | dict(params)


def _which(workflow_id: int | None, key: str | None, tenant: str | None) -> dict[str, Any]:
    return _given(id=workflow_id, key=key, tenant=tenant)


def _page_of(
    workflow_id: int | None, key: str | None, limit: int, cursor: str | None, tenant: str | None
) -> dict[str, Any]:
    return _which(workflow_id, key, tenant) | _given(limit=limit, cursor=cursor)


def _listed(state: str | None, limit: int, cursor: str | None, tenant: str | None) -> dict[str, Any]:
    return _given(state=state, limit=limit, cursor=cursor, tenant=tenant)


def _called_off(workflow_id: int | None, key: str | None, reason: str | None, tenant: str | None) -> dict[str, Any]:
    return _which(workflow_id, key, tenant) | _given(reason=reason)


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _late(workflow: Mapping[str, Any], timeout: float | None) -> Unavailable:
    return Unavailable(f"workflow {workflow['id']} is {workflow['state']} after {timeout} s")
