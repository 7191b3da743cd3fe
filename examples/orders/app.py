"""The shop's web application: `uvicorn examples.orders.app:app`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request

from examples.orders.actions import APPROVAL_CENTS, approval_token, fulfil
from examples.orders.database import Order, Sessions, create_tables, open_engine
from penstock import AsyncClient


@asynccontextmanager
async def opened(app: FastAPI) -> AsyncIterator[None]:
    engine = open_engine()
    await create_tables(engine)
    app.state.sessions = Sessions(engine)
    async with AsyncClient() as app.state.penstock:
        yield
    await engine.dispose()


app = FastAPI(title="Orders", lifespan=opened)


@app.post("/orders", status_code=201)
async def add_order(request: Request, item: str, cents: int) -> dict[str, int]:
    """The order and its task are stored together, or neither is."""
    sessions: Sessions = request.app.state.sessions
    async with sessions.begin() as session:
        order = Order(item=item, cents=cents)
        session.add(order)
        await session.flush()
        call = fulfil.with_options(unique_key=f"order-{order.id}", labels={"item": item})
        task = await call.enqueue_in(session, order.id, item, cents)
        return {"order": order.id, "task": task.id}


@app.get("/orders/{number}")
async def show_order(request: Request, number: int) -> dict[str, object]:
    sessions: Sessions = request.app.state.sessions
    async with sessions() as session:
        order = await session.get(Order, number)
    if order is None:
        raise HTTPException(404)
    return {"state": order.state, "payment": order.payment, "shipment": order.shipment}


@app.post("/orders/{number}/approval")
async def approve(request: Request, number: int, approved: bool, by: str) -> dict[str, object]:
    """Answer the event that the task of a large order waits for; an answer that comes first is kept for it."""
    shown = await show_order(request, number)
    if shown["state"] != "new":
        raise HTTPException(409, f"order {number} is {shown['state']}")
    client: AsyncClient = request.app.state.penstock
    await client.complete(approval_token(number), {"approved": approved, "by": by})
    return {"approved": approved, "needed_over_cents": APPROVAL_CENTS}
