"""Runs scenarios and prints their table: `python -m tests.chaos [--scenario NAME ...] [--seconds N] [--json FILE]`.

The exit code is 0 only if in every scenario nothing was lost, nothing was recorded twice, nothing ran twice that may
not, and every single process that was killed was made good within the bar.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from penstock.runtime.logs import setup_logging
from tests.chaos.arena import Arena
from tests.chaos.ledger import Fault, Row
from tests.chaos.scenarios import SCENARIOS, Scenario, chosen
from tests.rabbitmq import WHY_NOT

_COLUMNS = ("accepted", "settled", "lost", "twice", "wrong", "early", "given up", "ran again")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", action="append", nargs="+", choices=[*SCENARIOS], metavar="NAME", default=[],
                        help=f"one or more of: {', '.join(SCENARIOS)}")  # fmt: skip
    parser.add_argument(
        "--transport", choices=["sqs", "amqp"], default="sqs",
        help="amqp: a RabbitMQ of its own instead of SQS, and the scenarios that are for it",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=30, help="how long a lasting fault stays (30)")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--keep", type=Path, help="keep the logs of failed scenarios in this folder")
    options = parser.parse_args(arguments)
    names = [name for group in options.scenario for name in group]
    setup_logging("chaos", level="error")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    rows = []
    if options.transport == "amqp" and WHY_NOT is not None:
        parser.error(WHY_NOT)
    for scenario in chosen(names, options.transport):
        row = run_one(scenario, options.seconds, options.keep, options.transport)
        rows.append(row)
        _say(scenario, row)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n", "utf-8")
    _print(rows)
    return 0 if all(row.is_good for row in rows) else 1


def run_one(scenario: Scenario, seconds: float, keep: Path | None = None, transport: str = "sqs") -> Row:
    """One scenario on a stack of its own, in a folder that is removed afterwards."""
    row = Row(scenario.name, why_repeated=scenario.why_repeated)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepared = contextlib.nullcontext() if scenario.prepare is None else scenario.prepare(folder)
        with prepared as impossible:
            if impossible:
                row.skipped = impossible
                return row
            try:
                asyncio.run(_run(scenario, seconds, folder, row, transport))
            except Exception:
                row.problems.append(traceback.format_exc())
            if keep is not None and not row.is_good:
                keep.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    shutil.copy(folder / "stack.log", keep / f"{scenario.name}.log")
    return row


async def _run(scenario: Scenario, seconds: float, folder: Path, row: Row, transport: str) -> None:
    async with Arena(folder, row, env=scenario.env, transport=transport, database=scenario.database) as arena:
        await scenario.inflict(arena, seconds)
        await arena.conclude(may_repeat=bool(scenario.why_repeated))


def _say(scenario: Scenario, row: Row) -> None:
    """A line at once, for the whole takes a while."""
    word = "not run" if row.skipped else "good" if row.is_good else "FAILED"
    print(f"{time.strftime('%H:%M:%S')} {scenario.name}: {scenario.what}: {word}", file=sys.stderr, flush=True)
    for problem in row.problems:
        print(f"  {problem}", file=sys.stderr, flush=True)


def _print(rows: list[Row]) -> None:
    """The table; below each row the recoveries, and why tasks ran again."""
    print(f"{'scenario':<22}" + "".join(f"{column:>11}" for column in _COLUMNS) + "  after the load")
    for row in rows:
        if row.skipped:
            print(f"{row.scenario:<22}  not run: {row.skipped}")
            continue
        numbers = (row.accepted, row.settled, row.lost, row.twice, row.wrong, row.early, row.given_up, row.repeated)
        cells = "".join(f"{number:>11}" for number in numbers)
        print(f"{row.scenario:<22}{cells}{row.settled_after_seconds:>14.1f} s{'' if row.is_good else '  FAILED'}")
        print(f"  at the rate before after: {', '.join(map(_recovery, row.faults)) or '-'}")
        if row.repeated:
            print(f"  ran again: {row.why_repeated or 'nothing may'}")


def _recovery(fault: Fault) -> str:
    seconds = fault.recovery_seconds
    return f"{fault.name} {'never' if seconds is None else f'{seconds:.1f} s'}"


if __name__ == "__main__":
    sys.exit(main())
