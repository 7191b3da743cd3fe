"""`penstock doctor`: checks the live settings, Postgres and queues, and suggests a fix for each problem.

It changes nothing. Checks are independent: one that fails is a finding and hides no other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.cli.doctor.database import examine_database
from penstock.cli.doctor.deliveries import examine_deliveries
from penstock.cli.doctor.findings import Finding, Level
from penstock.cli.doctor.payloads import examine_payloads
from penstock.cli.doctor.queues import examine_queues
from penstock.cli.doctor.surroundings import examine_api, examine_settings
from penstock.settings.model import Settings

__all__ = ["Finding", "Level", "examine"]


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Every finding, including the good ones, one after the other."""
    for finding in examine_settings(settings):
        yield finding
    for finding in examine_deliveries(settings):
        yield finding
    async for finding in examine_payloads(settings):
        yield finding
    async for finding in examine_database(settings):
        yield finding
    async for finding in examine_queues(settings):
        yield finding
    async for finding in examine_api(settings):
        yield finding
