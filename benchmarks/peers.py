"""Other task queues beside Penstock: the same backlog of no-op tasks, drained in turn on this machine in one run.

`make peers`, or `python -m benchmarks.peers --help`. The peers live in a virtual environment of their own,
`.bench-peers`, made at the first run, and those written for Node in a folder of it, if
there is npm; they get the embedded Postgres (fsync on) and the embedded SQS that Penstock has,
with the settings that serve each best. Time runs from the start of the first handler to the last task recorded as done,
for all; `python -m benchmarks` itself counts from the moment the scheduler may claim, which is earlier. Repeats go
round in turn, so that a quiet or a busy minute of the machine is shared by all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.measure import seconds_to_look
from benchmarks.harness.scenarios.backlog import FROM_FIRST_CALL
from benchmarks.peer_venv import NODE, ROOT, SCRIPTS, make_node, make_venv, node_versions
from penstock.cli.common import print_table
from penstock.local.postgres import EmbeddedPostgres
from penstock.local.sqs import EmbeddedSqs
from penstock.runtime.logs import setup_logging

REPORTED = ("pgqueuer", "awa-pg", "celery", "kombu", "asyncpg", "uvloop")
STUCK_SECONDS = 120.0
OURS = {  # the scenario and how many workers, by name
    "penstock 1 worker": ("drain", 1),
    "penstock 2 workers": ("drain", 2),
    "penstock 2 workers, batched handler": ("batched", 2),
}

_AWA_DONE = """
    select coalesce((select sum(completed_count) from awa.receipt_completion_batches), 0)::bigint
         + (select count(*) from awa.done_entries)
"""


@dataclass(frozen=True)
class Peer:
    """A contender: its script, how many processes work, with which arguments, how what is done is counted.

    done: a statement, with {tasks} for how many there were.
    """

    name: str
    script: str
    tasks: int
    processes: int
    done: str
    arguments: tuple[str, ...] = ()
    waits: bool = True  # False: it cannot wait for the common start
    command: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def needs_node(self) -> bool:
        return self.script.endswith(".mjs")


_PGQUEUER_DONE = "select count(*) from pgqueuer_log where status = 'successful'"
_PGBOSS_DONE = "select count(*) from pgboss.job where state = 'completed'"
_GRAPHILE_DONE = "select {tasks} - count(*) from graphile_worker._private_jobs"  # what is done is deleted
_CELERY_DONE = "select count(*) from celery_taskmeta where status = 'SUCCESS'"


_CELERY = (
    "-m", "celery", "-A", "peer_celery:app", "worker", "-P", "prefork", "-c", "2", "-l", "ERROR",
    "--without-gossip", "--without-mingle", "--without-heartbeat",
)  # fmt: skip

PEERS = (
    Peer("pgqueuer 1 process", "peer_pgqueuer.py", 200_000, 1, _PGQUEUER_DONE),
    Peer("pgqueuer 2 processes", "peer_pgqueuer.py", 200_000, 2, _PGQUEUER_DONE),
    # The fuller its table, the slower: at a tenth it is at its best.
    Peer("pgqueuer 2 processes, 20,000 tasks", "peer_pgqueuer.py", 20_000, 2, _PGQUEUER_DONE),
    Peer("pg-boss 2 processes", "peer_pgboss.mjs", 200_000, 2, _PGBOSS_DONE, ("2000",)),
    Peer("graphile-worker 2 processes", "peer_graphile.mjs", 200_000, 2, _GRAPHILE_DONE, ("24",)),
    Peer("awa 1 process", "peer_awa.py", 50_000, 1, _AWA_DONE, ("2048",)),
    Peer("awa 2 processes", "peer_awa.py", 50_000, 2, _AWA_DONE, ("1024",)),
    # Under threads its result backend opens a connection for each result, which is far slower still.
    Peer("celery SQS, prefork 2", "peer_celery.py", 2_000, 1, _CELERY_DONE, waits=False, command=_CELERY),
)


def main() -> None:
    arguments = _arguments()
    chosen = [peer for peer in PEERS if arguments.peer is None or peer.kind in arguments.peer]
    setup_logging("peers", level="warning")
    python = make_venv()
    node = make_node() if any(peer.needs_node for peer in chosen) else "not asked for"
    for peer in [peer for peer in chosen if peer.needs_node and isinstance(node, str)]:
        print(f"{peer.name} is left out: {node}", file=sys.stderr)
        chosen.remove(peer)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-peers-", ignore_cleanup_errors=True) as folder:
        for number in range(1, arguments.repeat + 1):
            print(f"round {number} of {arguments.repeat}", file=sys.stderr)
            for name, (scenario, workers) in OURS.items():
                _note(rates, name, run_ours(Path(folder), arguments.tasks or 200_000, scenario, workers))
            with services(Path(folder) / f"services-{number}") as (postgres, sqs):
                for peer in chosen:
                    tasks = arguments.tasks or peer.tasks
                    with tempfile.TemporaryDirectory(dir=folder) as place:
                        program = Path(node) if peer.needs_node else python
                        _note(rates, peer.name, Run(peer, tasks, program, postgres, sqs, Path(place)).rate())
    ours = max(_median(rates[name]) for name in OURS)  # the best of ours against the best of theirs
    columns = ("contender", "tasks/s", "least", "most", "penstock's multiple")
    rows = [
        (name, round(statistics.median(found)), round(min(found)), round(max(found)), f"{ours / _median(found):.2f}")
        for name, found in rates.items()
    ]
    print_table(columns, rows, right=columns[1:])
    if arguments.json is not None:
        report = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "peers": versions(python) | node_versions(),
            "tasks": dict.fromkeys(OURS, arguments.tasks or 200_000)
            | {peer.name: arguments.tasks or peer.tasks for peer in chosen},
            "tasks_per_second": {
                name: {"median": round(_median(found)), "runs": [round(rate) for rate in found]}
                for name, found in rates.items()
            },
            "penstock_multiple": {name: round(ours / _median(found), 2) for name, found in rates.items()},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        print(f"written to {arguments.json}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drain the same no-op tasks by Penstock and by other task queues.")
    sizes = "200,000 for most (pgqueuer once more with 20,000), 50,000 for awa, 2,000 for celery"
    parser.add_argument("--tasks", type=int, help=f"how many for each; by default {sizes}")
    parser.add_argument("--repeat", type=int, default=1, help="rounds; the medians are reported")
    kinds = sorted({peer.kind for peer in PEERS})
    parser.add_argument("--peer", action="append", choices=kinds, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def _note(rates: dict[str, list[float]], name: str, rate: float) -> None:
    rates.setdefault(name, []).append(rate)
    print(f"  {name}: {rate:,.0f} tasks/s", file=sys.stderr)


def _median(found: Sequence[float]) -> float:
    return statistics.median(found)


def run_ours(folder: Path, tasks: int, scenario: str, workers: int) -> float:
    """`python -m benchmarks`, as any user runs it."""
    path = folder / "ours.json"
    command = [sys.executable, "-m", "benchmarks", scenario, "--tasks", str(tasks)]
    command += ["--workers", str(workers), "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks {scenario} failed:\n{done.stdout}{done.stderr}")
    rate: float = json.loads(path.read_text("utf-8"))["scenarios"][scenario]["figures"][FROM_FIRST_CALL]
    return rate


@contextlib.contextmanager
def services(folder: Path) -> Iterator[tuple[EmbeddedPostgres, EmbeddedSqs]]:
    """A Postgres and an SQS as a benchmark of ours brings up for itself."""
    postgres, sqs = EmbeddedPostgres(folder / "postgres"), EmbeddedSqs(folder / "sqs")
    with contextlib.ExitStack() as held:
        for service in (postgres, sqs):
            held.callback(service.stop)
            service.start()
        yield postgres, sqs


class Run:
    """One drain of one peer, in a database of its own."""

    def __init__(
        self, peer: Peer, tasks: int, program: Path, postgres: EmbeddedPostgres, sqs: EmbeddedSqs, folder: Path
    ) -> None:
        self._peer = peer
        self._tasks = tasks
        self._program = program  # that runs its script
        self._postgres = postgres
        self._folder = folder
        self._database = "peer"
        self._log = folder / "output"
        self._env = os.environ | {
            "PEER_DATABASE_URL": postgres.dsn(self._database),
            "PEER_SQS_URL": sqs.url,
            "PEER_FOLDER": str(folder),
            "PYTHONPATH": str(SCRIPTS),
            "PEER_NODE_MODULES": str(NODE),
            "AWS_ACCESS_KEY_ID": sqs.access_key_id,
            "AWS_SECRET_ACCESS_KEY": "penstock",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def rate(self) -> float:
        """Tasks a second."""
        self._postgres.create_database(self._database)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            self._fill()
            self._postgres.execute("checkpoint")
            with self._log.open("wb") as output:
                command = self._peer.command or (str(SCRIPTS / self._peer.script), "work", *self._peer.arguments)
                workers += [
                    subprocess.Popen(
                        [str(self._program), *command], env=self._env, cwd=self._folder, stdin=subprocess.DEVNULL,
                        stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                    for _ in range(self._peer.processes)
                ]  # fmt: skip
            return asyncio.run(self._measure(workers))
        finally:
            _end(workers)
            self._postgres.drop_database(self._database)

    def _fill(self) -> None:
        command = [str(self._program), str(SCRIPTS / self._peer.script), "fill", str(self._tasks)]
        done = subprocess.run(command, env=self._env, cwd=self._folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"filling {self._peer.name} failed:\n{done.stdout}{done.stderr}")

    async def _measure(self, workers: Sequence[subprocess.Popen[bytes]]) -> float:
        connection = await asyncpg.connect(self._postgres.dsn(self._database))
        try:
            if self._peer.waits:
                await self._until(lambda: len(self._times("ready")) == self._peer.processes, workers, "get ready")
                (self._folder / "go").touch()
            await self._until(lambda: bool(self._times("first")), workers, "begin")
            began = moved = time.monotonic()
            done = 0
            while done < self._tasks:
                await asyncio.sleep(seconds_to_look(done, self._tasks, time.monotonic() - began))
                now = await connection.fetchval(self._peer.done.format(tasks=self._tasks))
                if now > done:
                    done, moved = now, time.monotonic()
                elif time.monotonic() - moved > STUCK_SECONDS:
                    self._fail(f"stands still at {done} of {self._tasks}")
                self._check(workers)
            ended_ns = time.time_ns()
        finally:
            await connection.close()
        began_ns = min(int(path.read_text()) for path in self._times("first"))
        return self._tasks / ((ended_ns - began_ns) / 1e9)

    def _times(self, kind: str) -> list[Path]:
        return [path for path in self._folder.glob(f"{kind}.*") if kind == "ready" or path.stat().st_size]

    async def _until(self, condition: Any, workers: Sequence[subprocess.Popen[bytes]], what: str) -> None:
        deadline = time.monotonic() + STUCK_SECONDS
        while not condition():
            self._check(workers)
            if time.monotonic() > deadline:
                self._fail(f"did not {what}")
            await asyncio.sleep(0.005)

    def _check(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        if any(worker.poll() is not None for worker in workers):
            self._fail("has ended too early")

    def _fail(self, why: str) -> None:
        raise SystemExit(
            f"{self._peer.name} {why}; its output ends:\n{self._log.read_text('utf-8', 'replace')[-3000:]}"
        )


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # and whatever it has started itself
        worker.wait()


def versions(python: Path) -> dict[str, str]:
    """What is installed beside ours."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([str(python), "-c", code, *REPORTED], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
