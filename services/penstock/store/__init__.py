"""Postgres: one thin method per statement of ``penstock.sql``, over an asyncpg pool.

``store.session()`` runs statements one by one, ``store.transaction()`` runs several as one; both translate what a
database does when it is away, overloaded or switching over into :class:`~penstock.errors.Unavailable`.

``pool`` lends sessions. A ``session`` is made of what tasks go through, one module each: ``enqueuing``, ``claiming``,
``settling``, ``ordering``, ``rescheduling``, ``upkeep``; all of them run ``statements`` and answer with ``rows``.
Statements about anything else stand beside their subject, as functions that are given a session.
"""

from penstock.store.pool import PATIENT_SECONDS, PLANNING, Store
from penstock.store.rows import Dispatch, InFlight, Pace, Pair, Settled, Stale
from penstock.store.session import Session

__all__ = [
    "PATIENT_SECONDS",
    "PLANNING",
    "Dispatch",
    "InFlight",
    "Pace",
    "Pair",
    "Session",
    "Settled",
    "Stale",
    "Store",
]
