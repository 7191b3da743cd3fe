"""Real processes that reach Postgres through a real PgBouncer in transaction mode alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from penstock.local.postgres import EmbeddedPostgres
from tests.acceptance.conftest import penstock, running
from tests.pgbouncer import through

TASKS = 5000


def test_a_pipeline_through_a_pooler_settles_every_task(
    empty_database_url: str, postgres: EmbeddedPostgres, pgbouncer: int, data_path: Path
) -> None:
    url = through(empty_database_url, pgbouncer)
    with running(
        data_path / "stack", "--workers", "2", "--app", "tests.acceptance.app", "--database-url", url
    ) as stack:
        batch = [
            {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "echo", "payload": {"n": n}}, "id": n}
            for n in range(TASKS)
        ]
        ids = [reply["result"]["id"] for begin in range(0, TASKS, 1000) for reply in stack.post(batch[begin:][:1000])]
        assert len(set(ids)) == TASKS
        states: Counter[str] = Counter()
        for begin in range(0, TASKS, 1000):
            states.update(task["state"] for task in stack.settled(ids[begin:][:1000], seconds=120))
        assert states == {"SUCCESS": TASKS}
        doctor = penstock("doctor", "--data-dir", str(stack.data_dir))
        assert "ok       connection pooler" in doctor
        log = (stack.data_dir / "penstock.log").read_text()
    assert log.count("pooler_found") >= 5  # each process but the workers
    assert "task_died" not in log
    name = empty_database_url.rpartition("/")[2]
    settled = "select count(*) from penstock.task_history where state = 'SUCCESS'"
    assert postgres.fetch_value(settled, database=name) == TASKS
