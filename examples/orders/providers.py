"""Stand-ins of two services on the internet: a card processor and a carrier. They log what they do."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Declined(Exception):
    """The card was declined."""


async def charge_card(cents: int, *, reference: str) -> str:
    """Charge a card; returns the payment's id. reference: a call that repeats it charges nothing."""
    if cents > 1_000_000:
        raise Declined(f"{cents / 100:.2f} is over the card's limit")
    log.info("charged %s for %s", cents, reference)
    return f"payment-{reference}"


async def order_shipment(item: str, *, reference: str) -> str:
    """Have an item collected; returns the shipment's number. reference: as of `charge_card`."""
    log.info("collected %s for %s", item, reference)
    return f"shipment-{reference}"
