"""All statements together, on one connection."""

from __future__ import annotations

from penstock.store.claiming import Claiming
from penstock.store.enqueuing import Enqueuing
from penstock.store.rescheduling import Rescheduling
from penstock.store.upkeep import Upkeep


class Session(Enqueuing, Claiming, Rescheduling, Upkeep):
    """What is done with tasks in Postgres, on a connection that ``Store`` lends.

    Upkeep builds on settling, which builds on ordering; so all of it is here.
    """
