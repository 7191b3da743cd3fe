"""The whole pipeline at work: start it on this machine, export records through it, check that each was exported once.

`python -m examples.export.demo --tasks 5000` exits with 0 only if every record was exported exactly once, every task
is SUCCESS and no message was rejected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import asyncpg

from examples.export.actions import ERROR_RATE
from examples.export.database import DATABASE_URL
from examples.export.display import Display, Snapshot
from examples.export.feed import feed, positive, share
from examples.export.place import Place, PlaceError, own_place
from examples.export.summary import Summary, lines_of, summarize
from penstock.db.session import TRANSIENT
from penstock.protocol.errors import PenstockError
from penstock.settings.model import load_settings

_LOOK_EVERY_SECONDS = 0.25
_COUNTS = """
select state::text as state, count(*) as count from penstock.task group by 1
union all
select state::text, count(*) from penstock.task_history group by 1
union all
select 'rejected', count(*) from penstock.rejected
"""
# Quicker than production's, so that the last retry does not keep an audience waiting.
_RETRIES = {"PENSTOCK_RETRY_BASE_SECONDS": "0.5", "PENSTOCK_RETRY_CAP_SECONDS": "5"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        with own_place(options.data_dir.absolute()) as place:
            return _run(place, options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except PlaceError as exc:
        print(f"the demo could not run: {exc}", file=sys.stderr)
        return 1


def _run(place: Place, options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.time_limit
    print(f"starting Postgres, SQS and the processes in {place.path} ...", flush=True)
    try:
        state = place.up(_environment(options), workers=options.workers, within_seconds=options.time_limit)
        print(
            f"exporting {options.tasks:,} records with {options.workers} workers and "
            f"{options.error_rate:.0%} random errors; api {state['api']}",
            flush=True,
        )
        return _judge(place, options, *asyncio.run(_work(place, state, options, deadline)))
    finally:
        if options.keep:
            place.keep()
        else:
            place.down()


def _environment(options: argparse.Namespace) -> dict[str, str]:
    env = {
        name: value for name, value in os.environ.items() if name != DATABASE_URL
    }  # the stack makes one for the records
    if not _RETRIES.keys() & env.keys():
        env |= _RETRIES
    return env | {ERROR_RATE: str(options.error_rate)}


async def _work(
    place: Place, state: Mapping[str, Any], options: argparse.Namespace, deadline: float
) -> tuple[Summary | None, str | None]:
    """Enqueue, and watch until everything has settled; returns the summary, and the first problem."""
    trouble = None
    database_url, exports_url = state["database_url"], state["env"][DATABASE_URL]
    with Display(options.tasks, load_settings().stale_after_seconds) as display:
        feeding = asyncio.create_task(feed(state, options.tasks, on_progress=display.fed), name="feed")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for snapshot in _watch(place, database_url):
                    display.show(snapshot)
                    if feeding.done():
                        feeding.result()
                    if snapshot.rejected or (feeding.done() and snapshot.settled >= options.tasks):
                        break
        except TimeoutError:
            trouble = f"the time limit of {options.time_limit:g} s has passed"
        except PlaceError as exc:
            trouble = str(exc)
        except (PenstockError, asyncpg.PostgresError, OSError) as exc:
            trouble = f"feeding failed: {exc or type(exc).__name__}"
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
    try:
        async with contextlib.AsyncExitStack() as held:
            tasks = await asyncpg.connect(database_url, timeout=10, command_timeout=60)
            held.push_async_callback(tasks.close, timeout=10)
            exports = await asyncpg.connect(exports_url, timeout=10, command_timeout=60)
            held.push_async_callback(exports.close, timeout=10)
            return await summarize(tasks, exports, options.tasks, place.state()), trouble
    except (asyncpg.PostgresError, *TRANSIENT) as exc:
        reason = f"the tables cannot be read: {exc or type(exc).__name__}"
        return None, f"{trouble}; {reason}" if trouble else reason


async def _watch(place: Place, database_url: str) -> AsyncGenerator[Snapshot, None]:
    """Counts, repeatedly; waits while Postgres is unavailable. Raises PlaceError when its stack has ended."""
    connection: asyncpg.Connection[asyncpg.Record] | None = None
    try:
        while True:
            try:
                if connection is None:
                    connection = await asyncpg.connect(database_url, timeout=5, command_timeout=30)
                rows = await connection.fetch(_COUNTS)
            except TRANSIENT:
                if connection is not None:
                    connection.terminate()
                connection = None
                if not place.is_running():
                    raise PlaceError(f"its stack in {place.path} has ended: it was stopped or killed") from None
            else:
                counts = {row["state"]: row["count"] for row in rows}
                rejected = counts.pop("rejected")
                yield Snapshot(counts, rejected)
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
    finally:
        if connection is not None:
            connection.terminate()


def _judge(place: Place, options: argparse.Namespace, summary: Summary | None, trouble: str | None) -> int:
    """Print the summary; returns the exit code."""
    print()
    for line in lines_of(summary) if summary is not None else ():
        print(line)
    succeeded = summary is not None and not summary.problems and trouble is None
    if not succeeded:
        if trouble is not None:
            print(f"{'trouble':<12}{trouble}")
        print(f"\nthe log, {place.log}, ends:\n{place.log_tail()}")
    print()
    for line in place.next_steps(kept=options.keep):
        print(line)
    print("SUCCESS: every record was exported exactly once" if succeeded else "FAILED: see above", flush=True)
    return 0 if succeeded else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.export.demo", description=__doc__)
    parser.add_argument("--tasks", type=positive, default=5000, metavar="N", help="records to export (default 5000)")
    parser.add_argument(
        "--error-rate", type=share, default=0.05, metavar="SHARE",
        help="of the handler's calls fail at random, 0 to 1 (default 0.05)",
    )  # fmt: skip
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="worker processes (default 2)")
    parser.add_argument("--keep", action="store_true", help="leave everything running at the end")
    parser.add_argument(
        "--time-limit", type=positive, default=300, metavar="SECONDS", help="give up after this long (default 300)"
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path(".penstock", "demo"), metavar="DIR",
        help="emptied at the start; DIR-2 and so on while another demo has it (default .penstock/demo)",
    )  # fmt: skip
    return parser


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    """Take SIGTERM for a Ctrl-C, which asyncio knows how to pass to what runs; a second one leaves at once."""
    signal.signal(number, signal.SIG_DFL)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell has it for what a script puts into the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
