"""The action ``fulfil``: reserve, have large orders approved, charge, ship; SUCCESS commits with the order's state."""

from __future__ import annotations

from sqlalchemy import update
from sqlalchemy.dialects.postgresql import insert

import penstock
from examples.orders import providers
from examples.orders.database import Order, Sessions, Stock
from penstock import Context, EventTimeout, Fail, Step, StepFailed, action, inject

APPROVAL_CENTS = 50_000
APPROVAL_SECONDS = 3 * 86_400.0


def approval_token(order: int) -> str:
    return f"order-{order}-approval"


@action("fulfil", max_attempts=10, timeout=60)
async def fulfil(ctx: Context, order: int, item: str, cents: int, sessions: Sessions = inject()) -> dict[str, object]:
    """Each step runs once, whatever dies between them; a repeated call of a service has the same reference."""
    reference = f"order-{order}"
    await ctx.step("reserve", reserve, sessions, order, item)
    if cents > APPROVAL_CENTS:
        try:
            answer = await ctx.event(approval_token(order), timeout=APPROVAL_SECONDS)
        except EventTimeout:
            answer = {"approved": False}
        if not answer["approved"]:
            return await close(sessions, ctx, order, state="declined")
    try:
        payment = await ctx.step(Step("charge", retries=3), charge, cents, reference)
    except StepFailed:
        return await close(sessions, ctx, order, state="declined")
    shipment = await ctx.step("ship", providers.order_shipment, item, reference=reference)
    return await close(sessions, ctx, order, state="shipped", payment=payment, shipment=shipment)


async def reserve(sessions: Sessions, order: int, item: str) -> None:
    """Idempotent, as a step must be whose report may be lost with its worker."""
    async with sessions.begin() as session:
        await session.execute(insert(Stock).values(order_id=order, item=item).on_conflict_do_nothing())


async def charge(cents: int, reference: str) -> str:
    try:
        return await providers.charge_card(cents, reference=reference)
    except providers.Declined as exc:
        raise Fail(str(exc)) from exc  # another try would be declined too


async def close(sessions: Sessions, ctx: Context, order: int, **changed: str) -> dict[str, object]:
    """Commit the order's end and the task's SUCCESS in one transaction."""
    result = {"order": order, **changed}
    async with sessions.begin() as session:
        await session.execute(update(Order).where(Order.id == order).values(**changed))
        if not await penstock.settle(session, ctx, result):
            raise Fail("this attempt is over")  # rolls back; another one has settled the task
    return result
