"""A trial: handlers that block, hang, crash and exhaust memory, and what that costs their neighbours.

``python benchmarks/worker_faults.py`` starts a stack and runs through it
- 500 tasks of 200 ms in child processes, and the same with 25 that segfault, 25 that hang and 25 that exhaust memory;
- 2,000 tasks while a child is killed every 200 ms;
- 50 tasks that block the event loop of their worker for three visibility timeouts.
It ends with 1 where a neighbour's task failed or ran twice, or an error names another cause.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from penstock.client.client import Client
from penstock.protocol.errors import RpcError

ROOT = Path(__file__).parents[1]
_EACH = 25  # bad tasks of a kind among 500
_ERRORS = {"segfault": "ProcessDied", "hang": "TaskTimeout", "exhaust": "MemoryError"}
_VISIBILITY_SECONDS = 3
_MEMORY_BYTES = 256 * 2**20
_PATIENCE_SECONDS = 600
_SETTLED = {"SUCCESS", "CRITICAL_ERROR"}


@contextmanager
def stack(folder: Path, workers: int, **variables: Any) -> Iterator[Client]:
    env = os.environ | {name: str(value) for name, value in variables.items()} | {"PYTHONPATH": str(ROOT)}
    app = ["--app", "benchmarks.fault_actions", "--workers", str(workers)]
    subprocess.run(
        [sys.executable, "-m", "penstock", "up", "--detach", "--data-dir", str(folder), *app],
        env=env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with Client(state(folder)["api"]) as client:
            yield client
    finally:
        subprocess.run([sys.executable, "-m", "penstock", "down", "--data-dir", str(folder)], check=True)


def state(folder: Path) -> dict[str, Any]:
    """What ``penstock ps`` says of the stack."""
    command = [sys.executable, "-m", "penstock", "ps", "--data-dir", str(folder), "--json"]
    stated: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return stated


def run(client: Client, tasks: Sequence[tuple[str, Mapping[str, Any]]], **options: Any) -> tuple[float, list[Any]]:
    """Seconds until all are settled, and their records in order."""
    started = time.monotonic()
    given = [{"action": action, "payload": dict(payload), **options} for action, payload in tasks]
    ids = [one["id"] for one in client.enqueue_many(given) if not isinstance(one, RpcError)]
    found: dict[int, Any] = {}
    while len(found) < len(ids):
        if time.monotonic() > started + _PATIENCE_SECONDS:
            raise SystemExit(f"{len(ids) - len(found)} of {len(ids)} tasks are not settled after {_PATIENCE_SECONDS} s")
        time.sleep(0.1)
        left = [one for one in ids if one not in found][:1000]
        found |= {one["id"]: one for one in client.status(left, detail=True) if one and one["state"] in _SETTLED}
    return time.monotonic() - started, [found[one] for one in ids]


def crash_hang_exhaust(client: Client) -> bool:
    plain = [("plain", {"seconds": 0.2})] * 500
    mixed = [*plain[: -_EACH * len(_ERRORS)], *((bad, {}) for bad in _ERRORS for _ in range(_EACH))]
    random.Random(7).shuffle(mixed)
    run(client, plain[:50])  # which starts the children
    plain_seconds, _ = run(client, plain)
    seconds, records = run(client, mixed, max_attempts=1)
    ended = Counter(
        (action, record["state"], record["attempts"], ((record.get("error") or {}).get("data") or {}).get("type"))
        for (action, _), record in zip(mixed, records, strict=True)
    )
    print(f"500 tasks of 200 ms: {plain_seconds:.1f} s; with {_EACH} of each bad kind: {seconds:.1f} s, "
          f"{seconds / plain_seconds:.2f} times")  # fmt: skip
    for (action, *outcome), count in sorted(ended.items()):
        print(f"  {count} {action}: {outcome}")
    wanted: dict[tuple[str, str, int, str | None], int] = {("plain", "SUCCESS", 1, None): 500 - _EACH * len(_ERRORS)}
    wanted |= {(bad, "CRITICAL_ERROR", 1, error): _EACH for bad, error in _ERRORS.items()}
    return ended == Counter(wanted)


def kill_children(client: Client, folder: Path) -> bool:
    worker = next(one["pid"] for one in state(folder)["processes"] if one["name"] == "worker-1")
    server = next(one for one in psutil.Process(worker).children() if "fork_server" in " ".join(one.cmdline()))
    kills = 0
    ended = threading.Event()

    def kill() -> None:
        nonlocal kills
        while not ended.wait(0.2):
            with suppress(psutil.NoSuchProcess, IndexError):
                random.choice(server.children()).send_signal(signal.SIGKILL)
                kills += 1

    thread = threading.Thread(target=kill)
    thread.start()
    seconds, records = run(client, [("plain", {"seconds": 0.02})] * 2000)
    ended.set()
    thread.join()
    states = Counter(record["state"] for record in records)
    again = sum(record["attempts"] > 1 for record in records)
    print(f"2,000 tasks, {kills} kills of children in {seconds:.1f} s: {dict(states)}, {again} with a second attempt")
    return states == {"SUCCESS": 2000}


def block(client: Client, folder: Path) -> bool:
    runs = folder / "runs"
    payload = {"seconds": 3.0 * _VISIBILITY_SECONDS, "runs": str(runs)}
    seconds, records = run(client, [("block", payload)] * 50)
    begun = Counter(runs.read_text("ascii").split())
    print(
        f"50 tasks that block for {payload['seconds']:g} s, in {seconds:.0f} s: begun {dict(Counter(begun.values()))}"
    )
    return len(begun) == 50 and set(begun.values()) == {1} and all(one["state"] == "SUCCESS" for one in records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="children of the worker")
    processes = parser.parse_args().processes
    kept = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)  # as root, Postgres runs as another user
        pool = {"PENSTOCK_WORKER_PROCESSES": processes, "PENSTOCK_PROCESS_MAX_MEMORY_BYTES": _MEMORY_BYTES}
        with stack(folder / "pool", 1, **pool) as client:
            kept += [crash_hang_exhaust(client), kill_children(client, folder / "pool")]
        # One task a message and few at a time, so that all workers have some.
        loop = {"PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": _VISIBILITY_SECONDS, "PENSTOCK_PACK_MAX_TASKS": 1}
        with stack(folder / "loop", 10, **loop, PENSTOCK_WORKER_CONCURRENCY=5) as client:
            kept.append(block(client, folder / "loop"))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
