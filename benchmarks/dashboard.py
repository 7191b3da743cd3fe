"""How long each page of the dashboard takes over a large database: ``benchmarks/dashboard.py --finished 5000000``.

Starts a Postgres of its own, fills it by generate_series, serves the api and asks for each page by turns, as a browser
would. Prints the first, the median and the slowest answer in milliseconds; ends with 1 if a median is over --limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "services")]

import asyncpg  # noqa: E402
import httpx  # noqa: E402

from penstock.db.migrate import upgrade  # noqa: E402
from penstock.db.pool import Store  # noqa: E402
from penstock.local.postgres import EmbeddedPostgres  # noqa: E402
from penstock.settings.model import Settings, load_settings  # noqa: E402
from tests.conftest import reachable_folder  # noqa: E402

DAYS, ACTIONS, CHUNK = 7, 20, 250_000
COUNTED = ", counted"  # no page but a dry run: it looks at 100,000 records, so the limit is not for it
_ERROR = json.dumps({"code": -32000, "message": "ValueError: no", "data": {"type": "ValueError", "message": "no"}})

_SETTLED = f"""
insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
    claimed_at, created_at, updated_at, finished_at, result, failures, labels, unique_key)
select nextval('penstock.task_id_seq'), s.state::penstock.task_state, 'action-' || n % {ACTIONS},
    '{{"order": 4711, "customer": "c-23", "note": "as long as payloads often are"}}', 0, at, 1, 10,
    nextval('penstock.claim_seq'), at + interval '1 s', at, at + interval '2 s', at + interval '2 s',
    case when s.state = 'SUCCESS' then '{{"ok": true}}' end::json,
    case when s.state = 'CRITICAL_ERROR' then jsonb_build_array(jsonb_build_object('attempt', 1, 'claim', n, 'at', at,
        'error', $4::jsonb)) end,
    case when n % 10 = 0 then jsonb_build_object('tenant', 't-' || n % 100) end, 'key-' || n
from (select n, now() - interval '1 day' * ({DAYS - 1} * (1 - n::float8 / $3)) as at
      from generate_series($1::bigint, $2::bigint) n) made
cross join lateral (select case when n % 200 = 0 then 'CRITICAL_ERROR' when n % 333 = 0 then 'CANCELLED'
                                else 'SUCCESS' end as state) s
"""
_WAITING = f"""
insert into penstock.task (state, action, payload, priority, run_at, attempts, max_attempts, created_at, updated_at,
    labels)
select case when n % 50 = 0 then 'ERROR' else 'SCHEDULED' end::penstock.task_state, 'action-' || n % {ACTIONS},
    '{{"order": 4711}}', n % 3, now() + make_interval(secs => n % 600 - 300),
    case when n % 50 = 0 then 1 else 0 end, 10, now(), now(),
    case when n % 10 = 0 then jsonb_build_object('tenant', 't-' || n % 100) end
from generate_series(1, $1::bigint) n
"""


async def fill(url: str, finished: int, waiting: int) -> dict[str, int]:
    """Settled tasks over a week of partitions, live ones, and the counts that go with them; ids of some."""
    sql = await asyncpg.connect(url)
    for back in range(1, DAYS):
        for state in ("success", "critical_error", "cancelled"):
            day = f"(now() at time zone 'utc')::date - {back}"
            name, start = await sql.fetchrow(
                f"select to_char({day}, 'YYYYMMDD'), ({day})::timestamp at time zone 'utc'"
            )
            end = await sql.fetchval("select $1::timestamptz + interval '1 day'", start)
            await sql.execute(
                f"create table penstock.task_{state}_{name} partition of penstock.task_{state} "
                f"for values from ('{start}') to ('{end}')"
            )
    for first in range(1, finished + 1, CHUNK):
        await sql.execute(_SETTLED, first, min(first + CHUNK - 1, finished), finished, _ERROR, timeout=3600)
    await sql.execute(_WAITING, waiting, timeout=3600)
    await sql.execute(
        "insert into penstock.unique_key (action, key, task_id) "
        "select action, unique_key, id from penstock.task_history",
        timeout=3600,
    )
    await sql.execute(
        "insert into penstock.tally (at, action, event, count) "
        "select now() - interval '2 hours', action, state::text, count(*) from penstock.task_history group by 2, 3"
    )
    await sql.execute(
        f"insert into penstock.tally (at, action, event, count, seconds) "
        f"select date_trunc('minute', now()) - make_interval(mins => m), 'action-' || a, e, 100, 20 "
        f"from generate_series(3, 60) m, generate_series(0, {ACTIONS - 1}) a, "
        f"unnest(array['ENQUEUED', 'SUCCESS', 'ERROR', 'RAN']) e"
    )
    await sql.execute(
        "insert into penstock.audit (who, address, door, method, params, outcome, ended_at) "
        "select 'ada', '', 'http', 'cancel', '{}', 'ok', now() from generate_series(1, 20000)"
    )
    await sql.execute("vacuum analyze", timeout=3600)
    ids = {
        "success": await sql.fetchval("select id from penstock.task_success order by id limit 1"),
        "failed": await sql.fetchval("select max(id) from penstock.task_critical_error"),
        "live": await sql.fetchval("select min(id) from penstock.task"),
    }
    await sql.close()
    return ids


def pages(ids: dict[str, int], finished: int) -> dict[str, str]:
    return {
        "overview": "/",
        "tasks": "/tasks",
        "tasks, by state": "/tasks?state=SUCCESS",
        "tasks, failed of an action": "/tasks?state=CRITICAL_ERROR&action=action-0",
        "tasks, live of an action": "/tasks?state=ERROR&action=action-0",
        "tasks, of no action there is": "/tasks?action=none",
        "tasks, by label": "/tasks?labels=tenant%3Dt-50",
        "tasks, by a label there is not": "/tasks?labels=tenant%3Dnone",
        "tasks, by an old unique key": "/tasks?key=key-7",
        "tasks, of a day": "/tasks?since=" + time.strftime("%Y-%m-%dT00:00", time.gmtime(time.time() - 3 * 86_400)),
        "tasks, far down": f"/tasks?cursor={finished // 2}",
        "task, oldest": f"/tasks/{ids['success']}",
        "task, failed": f"/tasks/{ids['failed']}",
        "task, live": f"/tasks/{ids['live']}",
        "schedules": "/schedules",
        "workflows": "/workflows",
        "actions": "/actions",
        "bulk": "/bulk",
        f"bulk{COUNTED}": "/bulk?operation=bulk.delete&state=SUCCESS&count=yes",
        "rejected": "/rejected",
        "keys": "/keys",
        "audit": "/audit",
    }


async def measure(settings: Settings, ids: dict[str, int], finished: int, repeat: int) -> dict[str, list[float]]:
    from tests.integration.apis import running

    store = Store(settings.require_database_url, application_name="penstock-api@bench:1")
    taken: dict[str, list[float]] = {}
    async with (
        running(store, settings) as api,
        httpx.AsyncClient(base_url=api.url, headers={"Accept": "text/html"}, timeout=120) as http,
    ):
        for _ in range(repeat):
            for name, path in pages(ids, finished).items():
                await asyncio.sleep(1.05 if name == "overview" else 0)  # or it would be the one of a moment ago
                started = time.perf_counter()
                answer: Any = await http.get(path)
                taken.setdefault(name, []).append((time.perf_counter() - started) * 1000)
                answer.raise_for_status()
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=5_000_000)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--limit", type=float, default=200.0, help="milliseconds")
    given = parser.parse_args()
    with reachable_folder() as data:
        postgres = EmbeddedPostgres(data, options={"fsync": "off", "full_page_writes": "off"})
        postgres.start()
        try:
            postgres.create_database("pages")
            url = postgres.dsn("pages")
            upgrade(url)
            started = time.perf_counter()
            ids = asyncio.run(fill(url, given.finished, given.waiting))
            print(
                f"{given.finished:,} finished, {given.waiting:,} live; filled in {time.perf_counter() - started:.0f} s"
            )
            settings = load_settings(
                database_url=url,
                sqs_endpoint_url="http://127.0.0.1:9",
                aws_region="us-east-1",
                http_port=0,
                metrics_port=0,
            )
            taken = asyncio.run(measure(settings, ids, given.finished, given.repeat))
        finally:
            postgres.stop()
    print(f"{'page':34}{'first':>9}{'median':>9}{'slowest':>9}   ms")
    slow = 0
    for name, times in taken.items():
        median = statistics.median(times)
        slow += median > given.limit and not name.endswith(COUNTED)
        print(f"{name:34}{times[0]:9.0f}{median:9.0f}{max(times[1:] or times):9.0f}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
