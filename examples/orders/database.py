"""The shop's tables, in the database that holds the tasks, so that rows and tasks commit together."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from penstock import lifespan


class Sessions(async_sessionmaker[AsyncSession]):
    """Sessions of the shop's database; a class of its own, by which `inject()` finds it."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    """state: new, shipped or declined. payment, shipment: what the card processor and the carrier answered."""

    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(default="new")
    payment: Mapped[str | None]
    shipment: Mapped[str | None]


class Stock(Base):
    """A reservation of an item, at most one for an order."""

    __tablename__ = "shop_reservation"

    order_id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def open_engine() -> AsyncEngine:
    """The engine of DATABASE_URL."""
    return create_async_engine("postgresql+asyncpg:" + os.environ["DATABASE_URL"].partition(":")[2])


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


@lifespan
async def sessions() -> AsyncGenerator[Sessions, None]:
    """The sessions of a worker's handlers."""
    engine = open_engine()
    yield Sessions(engine)
    await engine.dispose()
