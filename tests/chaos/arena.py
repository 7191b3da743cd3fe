"""The arena: a whole stack of real processes, its SQS behind the proxy, under load, with what scenarios do to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import asyncpg
import httpx
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from penstock.brokers.base import Outgoing
from penstock.brokers.opening import open_transport
from penstock.cli.doctor.database import examine_invariants
from penstock.cli.doctor.findings import Report
from penstock.db.pool import Store
from penstock.local.children import Output
from penstock.local.service import HOST, Service, python_path
from penstock.local.sqs import EmbeddedSqs
from penstock.local.stack import Stack
from tests.chaos import proxy
from tests.chaos.app import LEDGER_VARIABLE
from tests.chaos.ledger import Fault, Ledger, Row, rate_of, read_finished, recovery_seconds, wait_settled
from tests.chaos.load import Load
from tests.failover import Address, Pair, url_of_hosts
from tests.rabbitmq import RabbitMq

PROCESSES = ("scheduler", "worker-1", "resulter", "submitter", "supervisor", "api", "worker-2")
# Short times, so that what is waited for after a fault fits into a test.
FAST = {
    "PENSTOCK_RETRY_BASE_SECONDS": "0.2",
    "PENSTOCK_RETRY_CAP_SECONDS": "2",
    "PENSTOCK_INBOUND_METHODS": "*",
    "PENSTOCK_POLL_SECONDS": "0.1",
    "PENSTOCK_SUPERVISOR_INTERVAL_SECONDS": "0.5",
    "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "4",
    "PENSTOCK_HEARTBEAT_SECONDS": "1",
    "PENSTOCK_STALE_AFTER_SECONDS": "6",
    "PENSTOCK_UNSENT_AFTER_SECONDS": "3",
    "PENSTOCK_UNTAKEN_AFTER_SECONDS": "15",
    "PENSTOCK_GRACE_SECONDS": "10",
    "PENSTOCK_RECEIVE_WAIT_SECONDS": "2",
}
ACCESS_KEY = "chaos"
_WARM_UP_SECONDS = 5.0
_RATE_SECONDS = 3.0  # over which the rate before is taken
_PATIENCE_SECONDS = 25.0  # for a recovery
_SETTLE_SECONDS = 90.0  # for the rest, once the load has stopped
_CLOCK = Path(__file__).with_name("clock")


class _ProxyService(Service):
    """The proxy as a child process."""

    name = "proxy"

    def __init__(self, data_dir: Path, upstream: str) -> None:
        super().__init__(data_dir)
        self._upstream = upstream

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)

    def launch(self) -> tuple[list[str], dict[str, Any]]:
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([python_path(), str(proxy.ROOT)])}
        return proxy.command(self._upstream, HOST, self.port), {"env": env}

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + proxy.CONTROL, timeout=2, trust_env=False).status_code == 200
        return False


class Arena:
    """Use it as a context: the stack is up and under load inside. folder: of all data, empty, on a disk.

    env: settings over :data:`FAST`. transport: sqs, behind the proxy, or amqp, a RabbitMQ without one.
    database: "" for the stack's own Postgres; else a primary with a standby, by the URL of both hosts or by one "name".
    """

    def __init__(
        self, folder: Path, row: Row, *, env: Mapping[str, str], transport: str = "sqs", database: str = ""
    ) -> None:
        self.folder = folder
        self.row = row
        self.log_path = folder / "stack.log"
        self.ledger = Ledger(folder / "ledger")
        self.done_by_proxy: dict[str, int] = {}
        own = {"PENSTOCK_SQS_ACCESS_KEY": f"{ACCESS_KEY}:any", LEDGER_VARIABLE: str(self.ledger.folder)}
        self._env = FAST | own | dict(env)
        self._transport = transport
        self._database = database
        self.pair = Pair(folder / "pair")
        self._proxy: _ProxyService | None = None
        self.rabbitmq: RabbitMq | None = None
        self._exit = contextlib.AsyncExitStack()
        self._rate_before = 0.0

    async def __aenter__(self) -> Arena:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def _start(self) -> None:
        self.ledger.folder.mkdir(parents=True)
        broker = await (self._start_rabbitmq() if self._transport == "amqp" else self._start_sqs())
        self._exit.enter_context(_environment(self._env))
        output = Output(self._exit.enter_context(self.log_path.open("wb")), colour=False)
        self.stack = Stack(
            self.folder / "stack", port=0, workers=2, apps=["tests.chaos.app"],
            output=output, **broker, **await self._start_pair(),
        )  # fmt: skip
        self._exit.push_async_callback(self.stack.stop)
        await self.stack.start()
        self.database_url: str = self.stack.state()["database_url"]
        self._connection: Any = None
        self._exit.push_async_callback(self._disconnect)
        send = await (self._sender_by_amqp() if self._proxy is None else self._sender_by_sqs(self._proxy.url))
        self._load = Load(self.ledger, api_url=lambda: str(self.stack.state()["api"]), send=send)
        await self._exit.enter_async_context(self._load)
        await self._warm_up()

    async def _start_sqs(self) -> dict[str, str]:
        sqs = EmbeddedSqs(self.folder / "sqs", access_key_id=ACCESS_KEY)
        await self._own(sqs)
        self._proxy = _ProxyService(self.folder / "proxy", sqs.url)
        await self._own(self._proxy)
        return {"sqs_endpoint_url": self._proxy.url}

    async def _start_pair(self) -> dict[str, str]:
        if not self._database:
            return {}
        self._exit.push_async_callback(asyncio.to_thread, self.pair.stop)
        self.pair.start()
        self.pair.primary.create_database("chaos")
        self.address = await self._exit.enter_async_context(Address(self.pair.primary.port))
        urls = [server.dsn("chaos") for server in (self.pair.primary, self.pair.standby)]
        return {"database_url": self.address.leads_to(urls[0]) if self._database == "name" else url_of_hosts(*urls)}

    async def _start_rabbitmq(self) -> dict[str, str]:
        self.rabbitmq = RabbitMq(self.folder / "rabbitmq")
        self._exit.push_async_callback(asyncio.to_thread, self.rabbitmq.close)
        await asyncio.to_thread(self.rabbitmq.start)
        return {"transport_url": self.rabbitmq.url}

    async def _sender_by_sqs(self, url: str) -> Callable[[str], Awaitable[bool]]:
        """A client of SQS that is not ours."""
        client = await self._exit.enter_async_context(
            get_session().create_client(
                "sqs", endpoint_url=url, region_name="us-east-1",
                aws_access_key_id=ACCESS_KEY, aws_secret_access_key="any",
            )
        )  # fmt: skip

        async def send(body: str) -> bool:
            try:
                await client.send_message(QueueUrl=self.stack.state()["queues"]["inbound"], MessageBody=body)
            except (BotoCoreError, ClientError, aiohttp.ClientError, OSError, TimeoutError):
                return False
            return True

        return send

    async def _sender_by_amqp(self) -> Callable[[str], Awaitable[bool]]:
        transport = open_transport(self.stack.settings)
        self._exit.push_async_callback(transport.close)
        queue = transport.queue(self.stack.settings.inbound_queue, label="inbound")

        async def send(body: str) -> bool:
            return not (await queue.send([Outgoing(body)])).failed

        return send

    async def _own(self, service: Service) -> None:
        self._exit.push_async_callback(asyncio.to_thread, service.stop)
        await service.start_async()

    async def _warm_up(self) -> None:
        await asyncio.sleep(_WARM_UP_SECONDS)
        now = time.time()
        finished = await read_finished(await self.connection(), now - _RATE_SECONDS)
        self._rate_before = self.row.rate_before = rate_of(finished, now - _RATE_SECONDS, now)
        assert self._rate_before > 0, f"nothing moves even before a fault; see {self.log_path}"

    # What scenarios do

    @contextlib.asynccontextmanager
    async def fault(self, name: str, *, bar_seconds: float | None = None) -> AsyncIterator[None]:
        """Around a blow: notes it, and then waits until tasks are settled at the old rate again."""
        began = time.time()
        yield
        fault = Fault(name, began, time.time(), bar_seconds)
        self.row.faults.append(fault)
        while time.time() < fault.ended + _PATIENCE_SECONDS:
            await asyncio.sleep(0.5)
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                finished = await read_finished(await self.connection(), fault.ended)
                fault.recovery_seconds = recovery_seconds(finished, fault.ended, self._rate_before, time.time())
                if fault.recovery_seconds is not None:
                    return

    def pid(self, name: str) -> int | None:
        entry = next(entry for entry in self.stack.state()["processes"] if entry["name"] == name)
        pid: int | None = entry["pid"]
        return pid

    def signal(self, name: str, number: signal.Signals) -> int | None:
        """Send a signal to a process or service; returns the pid, None when it is not running just now."""
        pid = self.pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def kill(self, name: str) -> None:
        """kill -9 of a process or service that runs."""
        assert self.signal(name, signal.SIGKILL) is not None, f"{name} does not run; see {self.log_path}"

    async def wait_anew(self, name: str, old_pid: int | None, *, seconds: float = 40) -> None:
        """Until a process runs under another pid and is ready."""
        deadline = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
            while time.monotonic() < deadline:
                entry = next(entry for entry in self.stack.state()["processes"] if entry["name"] == name)
                if entry["pid"] not in (None, old_pid):
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(entry["metrics"].replace("/metrics", "/readyz"))).status_code == 200:
                            return
                await asyncio.sleep(0.1)
        raise AssertionError(f"{name} was not ready again within {seconds:g} s; see {self.log_path}")

    async def weather(self, **members: Any) -> None:
        """What the proxy does from now on; nothing for fair weather. Without a proxy the weather is always fair."""
        if self._proxy is None:
            return
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            reply = await client.put(self._proxy.url + proxy.CONTROL, json=members)
            reply.raise_for_status()
            self.done_by_proxy = reply.json()

    async def delete_queues(self, *labels: str) -> None:
        """Delete queues with all that is in them, behind everybody's back."""
        assert self._proxy is not None
        async with get_session().create_client(
            "sqs", endpoint_url=self._proxy.url, region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key="any",
        ) as client:  # fmt: skip
            for label in labels:
                await client.delete_queue(QueueUrl=self.stack.state()["queues"][label])

    async def poison(self) -> None:
        """Send a task that kills its worker at each of its attempts."""
        self.ledger.poison.add(await self._load.enqueue("poison", max_attempts=3))

    async def connection(self) -> Any:
        """A connection of the ledger's own."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(
                self.database_url, timeout=5, command_timeout=20,
                server_settings={"application_name": "ledger", "default_transaction_read_only": "off"},
            )  # fmt: skip
        return self._connection

    async def promote(self) -> None:
        """Make the standby the primary; the ledger is held against it from now on."""
        await asyncio.to_thread(self.pair.promote)
        await self._disconnect()
        self.database_url = self.pair.standby.dsn("chaos")

    async def execute(self, statement: str) -> None:
        await (await self.connection()).execute(statement)

    async def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.terminate()

    # The end

    async def conclude(self, *, may_repeat: bool) -> None:
        """Stop the load, wait until all is settled, and hold the ledger against Postgres."""
        await self.weather()
        await asyncio.wait_for(self._load.finish(), 60)
        self.row.settled_after_seconds = await wait_settled(
            self.ledger, await self.connection(), seconds=_SETTLE_SECONDS
        )
        await self.ledger.check(await self.connection(), self.row, may_repeat=may_repeat)
        await self._look_for_broken()

    async def _look_for_broken(self) -> None:
        """What `penstock doctor --invariants` asks."""
        store, report = Store(self.database_url, pool_size=1), Report()
        async with store.session() as session:
            # A task that no worker has taken is overdue here, however long an installation may let it wait.
            await examine_invariants(
                session, report, self.stack.settings.model_copy(update={"untaken_after_seconds": 0.0})
            )
        await store.close()
        self.row.problems += [f"{one.what}: {one.seen}" for one in report.findings if one.level != "ok"]


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Any:
    """What the stack's processes find in their environment: these settings and no others."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        del os.environ[name]
    paths = [str(_CLOCK), str(proxy.ROOT), before.get("PYTHONPATH", "")]
    os.environ.update({**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
