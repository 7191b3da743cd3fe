"""Runs a stack under a steady mix for hours, and watches what grows: `make soak HOURS=2`.

Every second some tasks by HTTP: plain ones, of ordering keys, unique, limited, that fail at times; and a workflow.
Schedules fire every five seconds, and each minute a process is killed. It fails if a task does not settle in the end,
or an invariant of `penstock doctor --invariants` is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil

from penstock.cli.doctor.database import examine_invariants
from penstock.cli.doctor.findings import Report
from penstock.db.pool import Store
from penstock.local.children import Output
from penstock.local.stack import Stack
from tests.soak.chart import chart

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KILLED = ("scheduler", "worker-1", "worker-2", "resulter", "submitter", "supervisor", "api")
_ENV = {"PENSTOCK_RETRY_BASE_SECONDS": "1"}
_SETTLE_SECONDS = 180.0
_LATENCY = """
select count(*)::float8 as settled,
       percentile_cont(array[0.5, 0.99]) within group (order by extract(epoch from finished_at - run_at)) as seconds
from penstock.task_history where finished_at > now() - make_interval(secs => $1) and attempts = 1 and workflow is null
"""
# As above, of each quarter of the time: exact, where a mean of windows goes by when within its window a kill came.
_QUARTERS = """
select width_bucket(extract(epoch from finished_at), $1::float8, $2::float8, 4) as quarter,
       count(*)::float8 as settled,
       percentile_cont(array[0.5, 0.99, 0.999])
           within group (order by extract(epoch from finished_at - run_at)) as seconds
from penstock.task_history
where finished_at >= to_timestamp($1) and finished_at < to_timestamp($2) and attempts = 1 and workflow is null
group by 1 order by 1
"""
_SIZES = """
select (select count(*) from pg_stat_activity where backend_type = 'client backend')::float8 as connections,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8 as wal,
       (select n_dead_tup from pg_stat_user_tables where relid = 'penstock.task'::regclass)::float8 as dead_rows,
       pg_total_relation_size('penstock.task')::float8 as table_bytes,
       (select sum(pg_total_relation_size(relid)) from pg_stat_user_tables
        where schemaname = 'penstock' and relname !~ '^task')::float8 as other_bytes,
       (select count(*) from penstock.task)::float8 as live
"""


class Soak:
    """rate: tasks a second. samples: figures, by instant."""

    def __init__(self, stack: Stack, rate: int, seconds: float) -> None:
        self.stack = stack
        self.rate = rate
        self.seconds = seconds
        self.every_seconds = max(2.0, seconds / 360)
        self.samples: list[dict[str, Any]] = []
        self.kills: list[tuple[float, str]] = []
        self.sent = 0
        self.began = time.monotonic()
        self.began_at = time.time()
        self._numbers = itertools.count(1)

    async def load(self) -> None:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
            await self._set_up(http)
            while True:
                began = time.monotonic()
                await self._post(http, [self._task() for _ in range(self.rate)] + [self._workflow()])
                await asyncio.sleep(max(0.0, 1 - (time.monotonic() - began)))

    async def _set_up(self, http: httpx.AsyncClient) -> None:
        await self._post(http, [_call("action.set", {"action": "limited", "max_in_flight": 20})])
        schedules = [
            _call(
                "schedule.create", {"name": f"s{number}", "expression": "@every 5s", "action": "work", "replace": True}
            )
            for number in range(5)
        ]
        await self._post(http, schedules)

    def _task(self) -> dict[str, Any]:
        number = next(self._numbers)
        kind = number % 10
        params: dict[str, Any] = {"action": "limited" if kind == 6 else "flaky" if kind == 7 else "work"}
        if kind in (3, 4):
            params["ordering_key"] = f"k{random.randrange(50)}"
        if kind == 5:
            params |= {"unique_key": f"u{random.randrange(50)}", "unique": "live"}
        return _call("enqueue", params)

    def _workflow(self) -> dict[str, Any]:
        return _call("workflow.create", {"chain": [{"action": "work", "name": name} for name in "abc"]})

    async def _post(self, http: httpx.AsyncClient, requests: list[dict[str, Any]]) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answers = (await http.post(f"{self.stack.state()['api']}/rpc", json=requests)).json()
            problems = [answer["error"] for answer in answers if "error" in answer]
            if problems and problems[0]["code"] in (-32600, -32601, -32602):
                raise AssertionError(f"the soak asks for what is refused: {problems[0]}")
            self.sent += len(answers) - len(problems)

    async def kill_in_turn(self) -> None:
        pause = seconds_between_kills(self.seconds)
        for name in itertools.cycle(KILLED):
            await asyncio.sleep(pause)
            pid = self._pids().get(name)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills.append((round(time.monotonic() - self.began), name))

    async def hold(self, after: float, seconds: float) -> None:
        """A transaction that looks back, as that of a forgotten session."""
        await asyncio.sleep(after)
        connection = await asyncpg.connect(self.stack.state()["database_url"])
        await connection.execute("begin isolation level repeatable read; select txid_current()")
        await asyncio.sleep(seconds)
        await connection.close()

    async def watch(self) -> None:
        connection = await asyncpg.connect(self.stack.state()["database_url"])
        try:
            while True:
                await asyncio.sleep(self.every_seconds)
                latency = await connection.fetchrow(_LATENCY, self.every_seconds)
                seconds = latency["seconds"] or (None, None)
                sample = dict(await connection.fetchrow(_SIZES)) | {
                    "at": round(time.monotonic() - self.began, 1), "rate": latency["settled"] / self.every_seconds,
                    "p50_ms": _ms(seconds[0]), "p99_ms": _ms(seconds[1]), "memory_mb": {}, "files": {},
                }  # fmt: skip
                for name, pid in self._pids().items():
                    with contextlib.suppress(psutil.Error):
                        process = psutil.Process(pid)
                        sample["memory_mb"][name] = round(process.memory_info().rss / 2**20, 1)
                        sample["files"][name] = process.num_fds()
                self.samples.append(sample)
        finally:
            await connection.close()

    def _pids(self) -> dict[str, int]:
        return {one["name"]: one["pid"] for one in self.stack.state()["processes"] if one["pid"] is not None}

    async def quarters(self) -> list[dict[str, float | None]]:
        """Time from due to settled in each quarter of the time."""
        connection = await asyncpg.connect(self.stack.state()["database_url"])
        try:
            rows = await connection.fetch(_QUARTERS, self.began_at, self.began_at + self.seconds)
        finally:
            await connection.close()
        return [
            {"settled": row["settled"]}
            | dict(zip(("p50_ms", "p99_ms", "p99.9_ms"), map(_ms, row["seconds"]), strict=True))
            for row in rows
        ]

    async def conclude(self) -> list[str]:
        """Problems: tasks that do not settle, invariants that are broken."""
        store, report = Store(self.stack.state()["database_url"], pool_size=1), Report()
        try:
            async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
                await self._post(http, [_call("schedule.delete", {"name": f"s{number}"}) for number in range(5)])
            deadline = time.monotonic() + _SETTLE_SECONDS
            async with store.session() as session:
                while await session.value("count_live_up_to", 1):
                    if time.monotonic() > deadline:
                        break
                    await asyncio.sleep(1)
                left = await session.value("count_live_up_to", 1000)
                settings = self.stack.settings.model_copy(update={"untaken_after_seconds": 0.0})
                await examine_invariants(session, report, settings)
        finally:
            await store.close()
        broken = [f"{one.what}: {one.seen}" for one in report.findings if one.level != "ok"]
        return broken + ([f"{left} tasks have not settled after {_SETTLE_SECONDS:g} s"] if left else [])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _call(method: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}


def seconds_between_kills(seconds: float) -> float:
    """About a minute, so that each quarter of the time has the same kills; a minute if it is too short for that."""
    rounds = int(seconds / 4 // (60 * len(KILLED)))
    return seconds / 4 / rounds / len(KILLED) if rounds else 60.0


def growth(values: list[float | None]) -> float | None:
    """By what share the last quarter is above the second, which is behind the warm-up; None if there are too few."""
    quarter = len(values) // 4
    known = [
        [value for value in part if value is not None] for part in (values[quarter : 2 * quarter], values[-quarter:])
    ]
    if not quarter or not all(known) or not sum(known[0]):
        return None
    earlier, later = (sum(part) / len(part) for part in known)
    return round(later / earlier - 1, 3)


def figures(samples: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """What the charts show: by title the lines, by name."""

    def column(name: str, scale: float = 1.0) -> list[float | None]:
        return [None if sample[name] is None else sample[name] / scale for sample in samples]

    names = sorted({name for sample in samples for name in sample["memory_mb"]})
    wal = column("wal", 2**20)
    return {
        "settled, tasks/s": {"rate": column("rate")},
        "due to settled, ms": {"p50": column("p50_ms"), "p99": column("p99_ms")},
        "memory, MiB": {name: [sample["memory_mb"].get(name) for sample in samples] for name in names},
        "open files": {name: [sample["files"].get(name) for sample in samples] for name in names},
        "connections": {"connections": column("connections")},
        "dead rows of task": {"dead": column("dead_rows")},
        "size of task, MiB": {"task": column("table_bytes", 2**20), "other tables": column("other_bytes", 2**20)},
        "WAL, MiB/interval": {"wal": [None, *((b or 0) - (a or 0) for a, b in itertools.pairwise(wal))]},
        "live tasks": {"live": column("live")},
    }


async def run(args: argparse.Namespace, folder: Path) -> int:
    seconds = args.hours * 3600
    os.environ.update(_ENV)
    with (folder / "stack.log").open("wb") as log:
        stack = Stack(folder / "stack", port=0, workers=2, apps=["tests.soak.app"], output=Output(log, colour=False))
        try:
            await stack.start()
            soak = Soak(stack, args.rate, seconds)
            jobs = [soak.load(), soak.kill_in_turn(), soak.watch()]
            if args.hold_minutes:
                jobs.append(soak.hold(seconds / 4, args.hold_minutes * 60))
            tasks = [asyncio.create_task(job) for job in jobs]
            ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            problems = [repr(task.exception()) for task in ended if task.exception()] + await soak.conclude()
            quarters = await soak.quarters()
        finally:
            await stack.stop()
    shown = figures(soak.samples)
    grown = {title: {name: growth(line) for name, line in lines.items()} for title, lines in shown.items()}
    grown["due to settled, ms"] = {
        name: growth([one[f"{name}_ms"] for one in quarters]) for name in ("p50", "p99", "p99.9")
    }
    args.out.mkdir(parents=True, exist_ok=True)
    title = f"{args.rate} tasks/s for {args.hours:g} h, {len(soak.kills)} kills"
    instants = [sample["at"] for sample in soak.samples]
    (args.out / "soak.svg").write_text(chart(title, instants, shown))
    report = {
        "hours": args.hours, "rate": args.rate, "hold_minutes": args.hold_minutes, "sent": soak.sent,
        "kills": soak.kills, "problems": problems, "growth": grown, "quarters": quarters, "samples": soak.samples,
    }  # fmt: skip
    (args.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{title}; {soak.sent} requests accepted; growth from the second quarter to the last:")
    for name, lines in grown.items():
        print(f"  {name}: " + ", ".join(f"{line} {'-' if by is None else f'{by:+.1%}'}" for line, by in lines.items()))
    print("\n".join(problems) or "every task settled, every invariant holds")
    return 1 if problems else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2)
    parser.add_argument("--rate", type=int, default=50, help="tasks a second")
    parser.add_argument(
        "--hold-minutes", type=float, default=0, help="hold a transaction open, from the first quarter on"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of soak.json and soak.svg")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-", ignore_cleanup_errors=True) as name:
        sys.exit(asyncio.run(run(args, Path(name))))


if __name__ == "__main__":
    main()
