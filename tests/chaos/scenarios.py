"""What can happen to a pipeline, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from penstock.brokers.opening import create_queues
from tests.chaos.arena import FAST, PROCESSES, Arena
from tests.chaos.ledger import SINGLE_KILL_BAR_SECONDS

Inflict = Callable[[Arena, float], Awaitable[None]]
_OUTAGE_SECONDS = 8.0
_DISK_MEGABYTES = 320
_POISON_SECONDS = 120.0  # attempts, each of as many deliveries as the queue allows, each after a visibility timeout


@dataclass(frozen=True)
class Scenario:
    """inflict: gets the arena and for how many seconds to keep a lasting fault up.

    why_repeated: why tasks may run more than once, "" where none may. prepare: a context around the arena's folder.
    transports: those on which it can be inflicted. database: as of ``Arena``.
    """

    name: str
    what: str
    inflict: Inflict
    why_repeated: str
    env: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], contextlib.AbstractContextManager[str | None]] | None = None
    transports: tuple[str, ...] = ("sqs", "amqp")
    database: str = ""


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, why_repeated: str = "", **options: Any) -> Callable[[Inflict], Inflict]:
    """Register a scenario; its docstring says what happens."""

    def register(inflict: Inflict) -> Inflict:
        SCENARIOS[name] = Scenario(name, (inflict.__doc__ or "").strip(), inflict, why_repeated, **options)
        return inflict

    return register


# Processes

_KILLED = "runs and results of killed workers are done again"


@scenario("kill-each", _KILLED)
async def kill_each(arena: Arena, seconds: float) -> None:
    """kill -9 of each kind of process in turn, the next when the rate is back"""
    for name in PROCESSES[:6]:
        async with arena.fault(f"kill {name}", bar_seconds=SINGLE_KILL_BAR_SECONDS):
            arena.kill(name)


@scenario("kill-all", _KILLED)
async def kill_all(arena: Arena, seconds: float) -> None:
    """kill -9 of all processes at once"""
    async with arena.fault("kill all"):
        for name in PROCESSES:
            arena.kill(name)


@scenario("kills", _KILLED + "; SQS delivers twice")
async def kills(arena: Arena, seconds: float) -> None:
    """kill -9 of a random process every 2 s, while SQS duplicates 5 % and loses 5 % of replies"""
    await arena.weather(duplicate=0.05, lose_reply=0.05)
    async with arena.fault("kills every 2 s"):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            arena.signal(random.choice(PROCESSES), signal.SIGKILL)
            await asyncio.sleep(2)
        await arena.weather()


@scenario("frozen-worker", "the frozen worker's messages went to the other one meanwhile")
async def frozen_worker(arena: Arena, seconds: float) -> None:
    """SIGSTOP of a worker until its messages are others' and its tasks are stale, then SIGCONT"""
    # Its results may be on their way for another visibility timeout before repair takes it for silent.
    frozen = 2 * float(FAST["PENSTOCK_VISIBILITY_TIMEOUT_SECONDS"]) + float(FAST["PENSTOCK_STALE_AFTER_SECONDS"]) + 2
    async with arena.fault("freeze worker-1"):
        arena.signal("worker-1", signal.SIGSTOP)
        await asyncio.sleep(frozen)
        arena.signal("worker-1", signal.SIGCONT)


@scenario("poison", "neighbours of a task that kills its worker")
async def poison(arena: Arena, seconds: float) -> None:
    """a task that kills its worker each time, among thousands that do not"""
    async with arena.fault("poison"):
        await arena.poison()
        until = time.monotonic() + _POISON_SECONDS
        while time.monotonic() < until and await _unsettled_poison(arena):
            await asyncio.sleep(0.5)


async def _unsettled_poison(arena: Arena) -> int:
    query = "select count(*) from penstock.task where id = any($1::bigint[])"
    return int(await (await arena.connection()).fetchval(query, list(arena.ledger.poison)))


@scenario("rolling-restart")
async def rolling_restart(arena: Arena, seconds: float) -> None:
    """SIGTERM of every process in turn under load, the next when the one before is ready again"""
    for name in PROCESSES:
        async with arena.fault(f"restart {name}"):
            old = arena.signal(name, signal.SIGTERM)
            await arena.wait_anew(name, old)


@scenario(
    "clocks-apart",
    "",
    env={"CHAOS_CLOCK": "scheduler=86400,worker=-86400,resulter=3600,submitter=-3600,api=86400,supervisor=86400"},
)
async def clocks_apart(arena: Arena, seconds: float) -> None:
    """no two processes agree on the time: some are a day ahead, some a day behind"""
    async with arena.fault("clocks apart"):
        await asyncio.sleep(seconds)


# Postgres


@scenario("postgres-kill", "messages that were given back while Postgres was unavailable")
async def postgres_kill(arena: Arena, seconds: float) -> None:
    """kill -9 of Postgres, which recovers from its log"""
    async with arena.fault("kill postgres", bar_seconds=SINGLE_KILL_BAR_SECONDS):
        arena.kill("postgres")


@scenario("postgres-restart", "messages that were given back while Postgres was unavailable")
async def postgres_restart(arena: Arena, seconds: float) -> None:
    """a fast shutdown of Postgres, started again"""
    async with arena.fault("restart postgres"):
        arena.signal("postgres", signal.SIGINT)


@scenario("backends-killed", "claims whose sending could not be confirmed")
async def backends_killed(arena: Arena, seconds: float) -> None:
    """pg_terminate_backend of random connections, five times a second"""
    async with arena.fault("backends killed"):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await arena.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where application_name like 'penstock%' order by random() limit 5"
            )
            await asyncio.sleep(0.2)


@scenario("read-only", "claims whose sending could not be confirmed")
async def read_only(arena: Arena, seconds: float) -> None:
    """Postgres is read-only for a while, as in a failover"""
    async with arena.fault("read-only"):
        await arena.execute("alter system set default_transaction_read_only = on")
        await arena.execute("select pg_reload_conf()")
        await asyncio.sleep(_OUTAGE_SECONDS)
        await arena.execute("alter system reset default_transaction_read_only")
        await arena.execute("select pg_reload_conf()")


@scenario("connections-exhausted", "claims whose sending could not be confirmed")
async def connections_exhausted(arena: Arena, seconds: float) -> None:
    """300 strangers want connections, all that Postgres has are taken, and ours are ended"""
    strangers: list[Any] = []
    await arena.connection()
    async with arena.fault("connections exhausted"):
        until = time.monotonic() + _OUTAGE_SECONDS
        while time.monotonic() < until:
            await arena.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'penstock%'"
            )
            while len(strangers) < 300:
                wanted = [asyncpg.connect(arena.database_url, timeout=5) for _ in range(20)]
                got = await asyncio.gather(*wanted, return_exceptions=True)
                strangers += [one for one in got if isinstance(one, asyncpg.Connection)]
                if any(isinstance(one, asyncpg.TooManyConnectionsError) for one in got):
                    break
            await asyncio.sleep(0.5)
        for stranger in strangers:
            stranger.terminate()


_FAILOVER_BAR_SECONDS = 5.0  # from the instant at which the new primary can be reached
_DETECTION_SECONDS = 3.0  # until the standby is promoted


@scenario("failover", "claims whose sending could not be confirmed", database="hosts")
async def failover(arena: Arena, seconds: float) -> None:
    """the primary is killed, its synchronous standby promoted; the old one comes back read-only, first in the URL"""
    async with arena.fault("standby promoted", bar_seconds=_FAILOVER_BAR_SECONDS):
        await asyncio.to_thread(arena.pair.kill_primary)
        await asyncio.sleep(_DETECTION_SECONDS)
        await arena.promote()
    await arena.pair.return_read_only()
    async with arena.fault("old primary back", bar_seconds=_FAILOVER_BAR_SECONDS):
        await arena.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'penstock%'"
        )


@scenario("failover-by-name", "claims whose sending could not be confirmed", database="name")
async def failover_by_name(arena: Arena, seconds: float) -> None:
    """the primary's machine is lost, its connections stay half-open; its name leads to it again, read-only, then on"""
    async with arena.fault("name leads to the standby", bar_seconds=_FAILOVER_BAR_SECONDS):
        arena.address.lose()
        await asyncio.to_thread(arena.pair.kill_primary)
        await asyncio.sleep(seconds)
        await arena.promote()
        await arena.pair.return_read_only()
        arena.address.point_to(arena.pair.primary.port)
        await asyncio.sleep(_DETECTION_SECONDS)
        arena.address.point_to(arena.pair.standby.port)


@contextlib.contextmanager
def small_disk(folder: Path) -> Any:
    """The folder of Postgres on a disk of its own that is soon full; yields why not, where it cannot be had."""
    place = folder / "stack" / "postgres"
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m,mode=755", "chaos", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        yield "needs root, to mount a small disk"
        return
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        yield f"no small disk can be mounted: {mounted.stderr.strip()}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


@scenario("disk-full", "claims whose sending could not be confirmed", prepare=small_disk)
async def disk_full(arena: Arena, seconds: float) -> None:
    """the disk of Postgres is full for a while"""
    ballast = arena.folder / "stack" / "postgres" / "ballast"
    async with arena.fault("disk full"):
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 * 1024))
        await asyncio.sleep(_OUTAGE_SECONDS)
        ballast.unlink()


# SQS


@scenario("sqs-down", "runs whose result or deletion could not be sent in time", transports=("sqs",))
async def sqs_down(arena: Arena, seconds: float) -> None:
    """SQS refuses every connection"""
    async with arena.fault("SQS down"):
        await arena.weather(refuse=True)
        await asyncio.sleep(seconds)
        await arena.weather()


@scenario("sqs-loss", "SQS sends and delivers twice", transports=("sqs",))
async def sqs_loss(arena: Arena, seconds: float) -> None:
    """SQS duplicates 10 % and loses 10 % of replies"""
    async with arena.fault("SQS duplicates and loses"):
        await arena.weather(duplicate=0.1, lose_reply=0.1)
        await asyncio.sleep(seconds)
        await arena.weather()


@scenario("sqs-errors", "runs whose deletion failed", transports=("sqs",))
async def sqs_errors(arena: Arena, seconds: float) -> None:
    """SQS answers 20 % of calls with 500, 503 or throttling, and is slow"""
    async with arena.fault("SQS errs"):
        await arena.weather(error=0.2, delay=0.3, delay_seconds=0.5)
        await asyncio.sleep(seconds)
        await arena.weather()


@scenario("sqs-partial", "runs whose deletion failed", transports=("sqs",))
async def sqs_partial(arena: Arena, seconds: float) -> None:
    """20 % of the entries of each batch call fail"""
    async with arena.fault("SQS fails in part"):
        await arena.weather(partial=0.2)
        await asyncio.sleep(seconds)
        await arena.weather()


@scenario("queues-anew", "tasks whose message or result went with its queue", transports=("sqs",))
async def queues_anew(arena: Arena, seconds: float) -> None:
    """the outbound and the results queue are deleted with all that is in them, and made again 3 s later"""
    async with arena.fault("queues deleted"):
        await arena.delete_queues("outbound", "results")
        await asyncio.sleep(3)
        await create_queues(arena.stack.settings)


# RabbitMQ


@scenario("rabbitmq-restart", "what workers held was delivered again", transports=("amqp",))
async def rabbitmq_restart(arena: Arena, seconds: float) -> None:
    """an orderly stop of RabbitMQ, started again"""
    assert arena.rabbitmq is not None
    async with arena.fault("restart RabbitMQ"):
        await asyncio.to_thread(arena.rabbitmq.stop)
        await asyncio.to_thread(arena.rabbitmq.start)


@scenario("rabbitmq-kill", "what workers held was delivered again", transports=("amqp",))
async def rabbitmq_kill(arena: Arena, seconds: float) -> None:
    """kill -9 of RabbitMQ, which recovers from its log, and it stays away for a while"""
    assert arena.rabbitmq is not None
    async with arena.fault("kill RabbitMQ"):
        await asyncio.to_thread(arena.rabbitmq.kill)
        await asyncio.sleep(_OUTAGE_SECONDS)
        await asyncio.to_thread(arena.rabbitmq.start)


@scenario("connections-cut", "what workers held was delivered again", transports=("amqp",))
async def connections_cut(arena: Arena, seconds: float) -> None:
    """every connection to RabbitMQ is closed by an operator, again and again"""
    assert arena.rabbitmq is not None
    async with arena.fault("connections cut"):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.to_thread(arena.rabbitmq.ctl, "close_all_connections", "chaos")


# Everything


_CHANCES = ("POSTGRES", "COMMIT", "SEND", "RECEIVE", "DELETE", "EXTEND", "DUPLICATE", "HANDLER")


@scenario(
    "chaos-settings",
    "handlers and deletions fail, messages come twice",
    env={f"PENSTOCK_CHAOS_{name}": "0.02" for name in _CHANCES} | {"PENSTOCK_CHAOS_DELAY_SECONDS": "0.01"},
)
async def chaos_settings(arena: Arena, seconds: float) -> None:
    """every PENSTOCK_CHAOS_* setting at 2 %"""
    async with arena.fault("chaos settings"):
        await asyncio.sleep(seconds)


def chosen(names: list[str], transport: str) -> list[Scenario]:
    """The scenarios of these names, all that the transport knows for none. Raises KeyError."""
    known = [name for name, scenario in SCENARIOS.items() if transport in scenario.transports]
    return [SCENARIOS[name] for name in names or known]
