"""The station of `penstock conformance`, with programs of a shell."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cli.conformance import station as stations
from penstock.cli.conformance.station import Broken, Endpoint, Station


async def test_a_program_that_does_not_stop_is_killed_before_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stations, "GRACE_SECONDS", -2)  # one second after SIGTERM
    ready = tmp_path / "ready"
    command = f"sh -c 'trap : TERM; touch {ready}; while :; do sleep 0.1; done'"
    async with Endpoint(tmp_path) as endpoint:
        station = Station(endpoint, "stopped", command, timeout=5)
        async with station:
            while not ready.exists():
                await asyncio.sleep(0.02)
            with pytest.raises(Broken, match="it had not ended 1 s after SIGTERM"):
                await station.stop()
            assert station._program.pid is None
