"""Simulates the whole pipeline: ``make simulate SEEDS=300``. See docs/operations.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.db.migrate import upgrade
from penstock.local.postgres import EmbeddedPostgres
from tests import postgres_versions
from tests.claims import use_known_key
from tests.conftest import reachable_folder
from tests.simulation.database import SCHEMA
from tests.simulation.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
_SEEDS_PER_CHILD = 25  # a child keeps what its dead processes have left behind
_OPTIONS = {
    "fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "autovacuum": "off",
    "max_connections": "300", "wal_level": "minimal", "max_wal_senders": "0", "jit": "off",
}  # fmt: skip
_MUTATION_SEEDS = 80


class Databases:
    """Databases that follow the simulated clock, on a server of their own.

    One is used at a time: what many changes of one database's tables have its server forget of all others makes plans
    again, in the midst of a run.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        server.create_database("simulation")
        upgrade(server.dsn("simulation"))
        use_known_key(server, "simulation")
        server.execute(SCHEMA, database="simulation")
        self._count = 0

    def make(self) -> str:
        """A new database instead of the one before; returns its URL."""
        if self._count:
            self._server.drop_database(f"simulation_{self._count}")
        self._count += 1
        name = f"simulation_{self._count}"
        self._server.create_database(name, template="simulation")
        return self._server.dsn(name)


@contextmanager
def databases() -> Iterator[Databases]:
    with reachable_folder() as folder:
        server = postgres_versions.server(folder, options=_OPTIONS)
        server.start()
        try:
            yield Databases(server)
        finally:
            for backend in psutil.Process(server.pid).children():
                with suppress(psutil.NoSuchProcess):  # a worker of vacuum that has just ended
                    backend.send_signal(signal.SIGCONT)  # a child that was killed may have left it stopped
            server.stop()


def simulate(url: str, *options: str) -> Iterator[dict[str, Any]]:
    """Run plans in a child; yields an outcome each. Raises RuntimeError if the child fails."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.simulation.child", "--url", url, *options],
        cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise RuntimeError(f"the simulation ended with exit code {child.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=25, help="requests of clients in each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--plan", type=Path, help="run a plan that was written by --shrink instead")
    parser.add_argument("--shrink", type=Path, help="write the smallest plan that still fails to this file")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and print where its runs differ")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="with this statement broken on purpose")
    parser.add_argument("--mutations", action="store_true", help="with each of them; all have to be noticed")
    args = parser.parse_args()
    with ExitStack() as stack:
        made: SimpleQueue[Databases] = SimpleQueue()
        for _ in range(args.jobs):
            made.put(stack.enter_context(databases()))
        sys.exit((check_mutations if args.mutations else check_twice if args.twice else run_seeds)(made, args))


def run_seeds(made: SimpleQueue[Databases], args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 1 if a property did not hold."""
    failed = sum(outcome["problem"] is not None for outcome in run_all(made, args))
    print(f"{1 if args.plan else args.seeds} seeds, {failed} failed")
    return 1 if failed else 0


def run_all(made: SimpleQueue[Databases], args: argparse.Namespace, *more: str) -> Iterator[dict[str, Any]]:
    """Run all seeds, and print what failed; yields an outcome each. more: options of the child."""
    more += tuple(f"--{name}={value}" for name in ("plan", "shrink", "mutation") if (value := getattr(args, name)))
    seeds = 1 if args.plan else args.seeds
    outcomes: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def run(first: int) -> None:
        mine = made.get()
        try:
            count = min(_SEEDS_PER_CHILD, args.seed + seeds - first)
            options = (f"--first={first}", f"--seeds={count}", f"--steps={args.steps}", *more)
            for outcome in simulate(mine.make(), *options):
                outcomes.put(outcome)
        finally:
            made.put(mine)
            outcomes.put(None)

    with _progress() as bar, ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run, first) for first in range(args.seed, args.seed + seeds, _SEEDS_PER_CHILD)]
        shown = bar.add_task("seeds", total=seeds)
        left = len(runs)
        while left:
            outcome = outcomes.get()
            if outcome is None:
                left -= 1
                continue
            bar.advance(shown)
            if outcome["problem"] is not None or seeds == 1:
                bar.console.print(text_of(outcome), highlight=False, markup=False)
            yield outcome
        for finished in runs:
            finished.result()


def check_twice(made: SimpleQueue[Databases], args: argparse.Namespace) -> int:
    """Run each seed behind others of two orders. Returns the exit code: 0, or 1 if a run of a seed differed."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for order in ("forwards", "backwards"):
            lines = Path(folder) / order
            lines.mkdir()
            runs.append({o["seed"]: o["digest"] for o in run_all(made, args, f"--{order}", f"--lines={lines}")})
        different = sorted(seed for seed in runs[0] if runs[0][seed] != runs[1][seed])
        for seed in different:
            both = [(Path(folder) / order / seed).read_text().split("\n") for order in ("forwards", "backwards")]
            place = next(i for i, (one, other) in enumerate(zip_longest(*both)) if one != other)
            print(
                f"seed {seed}, in line {place}:", *(one for lines in both for one in lines[place : place + 1]), sep="\n"
            )
    print(f"{len(runs[0])} seeds, {len(different)} of which had two different runs")
    return 1 if different else 0


def check_mutations(made: SimpleQueue[Databases], args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 1 if one was not noticed."""

    def run(name: str) -> str | None:
        mine = made.get()
        options = (f"--first={args.seed}", f"--seeds={_MUTATION_SEEDS}", f"--steps={args.steps}", "--until-failure")
        try:
            for outcome in simulate(mine.make(), f"--mutation={name}", *options):
                if outcome["problem"] is not None:
                    return f"seed {outcome['seed']}: {outcome['problem'].splitlines()[0][:150]}"
            return None
        finally:
            made.put(mine)

    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(MUTATIONS, pool.map(run, MUTATIONS), strict=True))
    for name, problem in found.items():
        print(f"{name}: {problem or 'NOT NOTICED'}")
    return 1 if None in found.values() else 0


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


def text_of(outcome: dict[str, Any]) -> str:
    if outcome["problem"] is not None:
        return "\n".join([*outcome["history"], f"seed {outcome['seed']}: {outcome['problem']}"])
    return (
        f"seed {outcome['seed']}: all properties held after each of {outcome['commits']} commits, in "
        f"{outcome['statements']} statements and {outcome['seconds']:.0f} simulated seconds, with "
        f"{outcome['kills']} kills; {outcome['succeeded']} tasks succeeded; digest {outcome['digest'][:12]}"
    )


if __name__ == "__main__":
    main()
