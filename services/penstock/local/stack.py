"""The whole pipeline on one machine: Postgres, SQS, schema, queues and every process, started and stopped in order."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.local.children import Child, Children, Output
from penstock.local.postgres import SUPERUSER, EmbeddedPostgres
from penstock.local.service import HOST, Service, answers, die_with_parent, free_port, is_free, python_path
from penstock.local.sqs import REGION, EmbeddedSqs
from penstock.local.state import DataDir, end_leftovers
from penstock.protocol.api_key import Permission, digest_of, new_secret
from penstock.protocol.errors import StackError
from penstock.runtime.logs import log
from penstock.runtime.periodic import is_set_within
from penstock.settings.broker_urls import BrokerUrl, parse_broker_url
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import masked

DATABASE = "penstock"
READY_WITHIN_SECONDS = 60.0
GIVE_UP_AFTER_EXITS = 3  # of one process before the stack was ever ready
WRONG_SETTINGS = [2, 2]  # exit codes; once may be a port that was lost to another program, the next try takes a new one
LOCAL_DEFAULTS = {"receive_wait_seconds": "1", "visibility_timeout_seconds": "30"}
_OF_ANOTHER_DATABASE = (
    "POOLER", "LISTEN_URL", "READ_URL", "PASSWORD_FILE", "PASSWORD_COMMAND", "SSL_MODE", "SSL_ROOT_CERT", "SSL_CERT",
    "SSL_KEY",
)  # fmt: skip
# Not for workers: handlers, and what they import, could reach everything by them.
_WITHHELD = re.compile("PENSTOCK_(DATABASE_.*|API_KEYS?|CONTROL_API_KEY|SCHEDULER0_AUTH_PASSWORD)", re.IGNORECASE)
_CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
_CREDENTIAL_OPTIONS = frozenset({
    "aws_access_key_id", "credential_process", "role_arn", "web_identity_token_file", "sso_session", "sso_start_url",
    "login_session",
})  # fmt: skip


@dataclass(eq=False, repr=False)
class Stack:
    """`penstock up` as an object: ``start``, then ``state`` has the URLs, then ``stop``.

    folder: of all data, `.penstock` in the current folder when None; one stack per folder.
    port: of the api; None takes the one set as PENSTOCK_HTTP_PORT, else 8080 or the next free.
    workers: number of worker processes; apps: modules with handlers that each of them loads.
    fleets: workers of other queues, by queue name; the queues are made, routes to them are not.
    schedulers: number of scheduler processes; one is enough for all but the largest machines.
    one_process: run all but the workers in one process, `penstock run`. reload: start workers again when code changes.
    database_url, sqs_endpoint_url, transport_url: use these instead of the embedded Postgres or SQS.
    settings: those of the user, and once started those that the processes run with.
    Raises StackError or SettingsError from ``start``, with the next step.
    """

    folder: Path | None
    _: KW_ONLY
    port: int | None = None
    workers: int = 1
    fleets: Mapping[str, int] = field(default_factory=dict)
    schedulers: int = 1
    one_process: bool = False
    reload: bool = False
    apps: Sequence[str] = ()
    database_url: str | None = None
    sqs_endpoint_url: str | None = None
    transport_url: str = "sqs://"
    output: Output = field(
        default_factory=lambda: Output(sys.stderr.buffer, colour=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
    )
    settings: Settings = field(init=False)

    def __post_init__(self) -> None:
        self.data_dir = DataDir(self.folder)
        self._services: list[Service] = []
        self._children = Children(self.output, self._publish)
        self._workers: list[Child] = []
        self._queues: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._own_database: dict[str, str] = {}
        self._example: dict[str, str] = {}
        self._control_key = new_secret()
        self._suggestion: dict[str, Any] | None = None
        self._http_port = 0
        self._http_ports_near = 0  # tried from the first one on, before any other; 0: the port is fixed
        self._grace_seconds = 30.0
        self._ready = False
        self._held = contextlib.ExitStack()

    async def start(self) -> None:
        """Bring everything up and wait until every process is ready. Call ``stop`` also after a start that failed."""
        try:
            broker = parse_broker_url(self.transport_url)
        except ValueError as exc:
            raise StackError(f"the URL of the transport {exc}") from exc
        if broker.kind != "sqs" and self.sqs_endpoint_url:
            raise StackError("name either another broker (--transport-url) or another SQS (--sqs-endpoint-url)")
        if "worker" in self.fleets:
            raise StackError("no fleet can have a queue named worker: its processes would be named as the workers are")
        self.data_dir.prepare()
        left_behind = self._held.enter_context(self.data_dir.held())
        if left_behind is not None:
            await asyncio.to_thread(end_leftovers, left_behind)
        self.settings = user = load_settings()  # mistakes in it come to light before anything is started
        self._http_port = self._api_port()
        self._grace_seconds = user.grace_seconds + 5

        database_url, sqs_url, access_key = await self._start_services(broker)
        os.environ.update(_no_proxy())  # for our own calls to SQS
        self._places = self._places_of(user, sqs_url, access_key)
        settings = self._places | {"PENSTOCK_DATABASE_URL": database_url}
        settings |= {"PENSTOCK_HTTP_TLS_CERT": "", "PENSTOCK_HTTP_TLS_KEY": ""}  # its parts talk to each other by HTTP
        if self.database_url is None:  # the embedded one has no TLS, and is not reached over a network
            self._own_database = {f"PENSTOCK_DATABASE_{name}": "" for name in _OF_ANOTHER_DATABASE}
            self._own_database["PENSTOCK_DATABASE_IAM"] = "false"
            settings |= self._own_database
        overrides = {name.removeprefix("PENSTOCK_").lower(): value for name, value in settings.items()}
        self.settings = load_settings(**overrides)
        await asyncio.gather(self._migrate(self.settings.require_database_url), self._create_queues())
        log.info("queues_ready", **self._queues)
        await self._start_processes(settings)
        self._ready = True
        self.data_dir.write_state(self.state())

    async def _start_processes(self, settings: Mapping[str, str]) -> None:
        """Start the processes with the caller's environment and these settings in it, and wait until all are ready."""
        for service in self._services:
            again = self._create_queues if isinstance(service, EmbeddedSqs) else None
            self._children.keep_service(service, again)
        env = os.environ | settings | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        env = {name: value for name, value in env.items() if name.upper() != "PENSTOCK_API_URL"}  # another stack's?
        if not _has_credentials():  # real ones stay: handlers may call other services by them
            env |= _of_sdks(self._places)
        metrics_host = _reachable(self.settings.metrics_host)

        worker_env = {name: value for name, value in env.items() if not _WITHHELD.fullmatch(name)} | self._example
        worker = [sys.executable, "-m", "penstock", "worker", *(word for app in self.apps for word in ("--app", app))]
        worker += ["--reload"] if self.reload else []
        commands = {f"worker-{number}": worker for number in range(1, self.workers + 1)}
        for queue, count in self.fleets.items():
            commands |= {f"{queue}-{number}": [*worker, "--queue", queue] for number in range(1, count + 1)}
        # Their ports are chosen before anything starts, since the api receives them; each keeps its own over restarts.
        for name, command in commands.items():
            self._workers.append(Child(name, command, worker_env, free_port(), metrics_host, self._control_environment))

        names = ["run"] if self.one_process else ["api", "submitter", "scheduler", "resulter", "supervisor"]
        if self.settings.kafka_source_json_topics or self.settings.kafka_source_avro_topics:
            names.append("kafka-source")
        has_clockwork = self.settings.clockwork_api or self.settings.clockwork_port is not None
        if self.settings.kafka_brokers is not None and has_clockwork:
            names.append("clockwork-source")
        processes = {name: name for name in names}
        processes |= {f"scheduler-{number}": "scheduler" for number in range(2, self.schedulers + 1)}
        for name, process in processes.items():
            more = self._api_environment if name in ("api", "run") else dict
            self._children.keep(Child(name, [sys.executable, "-m", "penstock", process], env, 0, metrics_host, more))
        for child in self._workers:
            self._children.keep(child)
        await asyncio.gather(self._wait_ready(), self._find_suggestion(worker_env))

    def _api_port(self) -> int:
        user, wanted = self.settings, self.port
        if wanted is None and "http_port" in user.model_fields_set:
            wanted = user.http_port
        if wanted:
            if not is_free(wanted, user.http_host):
                raise StackError(
                    f"port {wanted} is taken, or cannot be had on {user.http_host}: name another one with --port, or "
                    "leave it out to take a free"
                )
            return wanted
        # From where ports are given out, the next one may be promised to a process that does not listen yet.
        self._http_ports_near = 1 if wanted == 0 else 100
        return free_port() if wanted == 0 else self._next_http_port(user.http_port)

    def _next_http_port(self, first: int) -> int:
        near = range(first, min(first + self._http_ports_near, 65536))
        return next((port for port in near if is_free(port, self.settings.http_host)), None) or free_port()

    def _api_environment(self) -> dict[str, str]:
        """Where the api listens, and the workers that its dashboard checks, which have no connection to Postgres. Until
        the URL is published the port changes if another process took it first."""
        if self._http_ports_near and not self._ready:
            self._http_port = self._next_http_port(self._http_port)
        settings = self.settings
        env = {"PENSTOCK_HTTP_HOST": settings.http_host, "PENSTOCK_HTTP_PORT": str(self._http_port)}
        if settings.needs_keys and settings.control_api_key is None:
            entry = f"local-workers:{Permission.WORKER}:{digest_of(self._control_key.encode()).hex()}"
            env["PENSTOCK_API_KEYS"] = ",".join([*(key.get_secret_value() for key in settings.api_keys), entry])
        if "dashboard_processes" not in settings.model_fields_set:
            env["PENSTOCK_DASHBOARD_PROCESSES"] = ",".join(f"{worker.name}={worker.url}" for worker in self._workers)
        return env

    def _control_environment(self) -> dict[str, str]:
        """Where workers ask which of their tasks were cancelled, and with which key, where one is needed: that of the
        settings, or one of this start alone, which the api takes for nothing else."""
        env = {"PENSTOCK_CONTROL_URL": f"{self._api_url}/rpc"}
        if self.settings.needs_keys:
            key = self.settings.control_api_key
            env["PENSTOCK_CONTROL_API_KEY"] = key.get_secret_value() if key else self._control_key
        return env

    async def _start_services(self, broker: BrokerUrl) -> tuple[str, str, str]:
        """Start Postgres and SQS, both at once; returns their URLs, and the embedded SQS's access key, `ID:SECRET`."""
        postgres = None if self.database_url else EmbeddedPostgres(self.data_dir.path / "postgres")
        needs_sqs = broker.kind == "sqs" and not self.sqs_endpoint_url
        sqs = EmbeddedSqs(self.data_dir.path / "sqs") if needs_sqs else None
        self._services = [service for service in (postgres, sqs) if service is not None]
        starts = (service.start_async() for service in self._services)
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        for service in self._services:
            log.info("service_ready", name=service.name, pid=service.pid, port=service.port)
        database_url = self.database_url or ""
        if postgres is not None:
            await asyncio.to_thread(self._prepare_databases, postgres)
            database_url = postgres.dsn(DATABASE)
        if sqs is None:
            return database_url, self.sqs_endpoint_url or "", ""
        return database_url, sqs.url, f"{sqs.access_key_id}:penstock"

    def _prepare_databases(self, postgres: EmbeddedPostgres) -> None:
        postgres.create_database(DATABASE)
        # The role has the name of Penstock's schema, so the default ("$user", public) would put tables of applications
        # into it, and take Penstock's `job` for one of theirs.
        postgres.execute(f"alter role {SUPERUSER} in database {DATABASE} set search_path = public")
        runs_example = any(f"{app}.".startswith("examples.export.") for app in self.apps)
        if runs_example and "EXPORT_DATABASE_URL" not in os.environ:
            self._example["EXPORT_DATABASE_URL"] = postgres.own_database("export")

    async def _migrate(self, database_url: str) -> None:
        from penstock.db.connecting import connecting_options
        from penstock.db.migrate import upgrade

        try:
            await asyncio.to_thread(upgrade, database_url, **connecting_options(self.settings))
        except Exception as exc:
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise StackError(f"the schema of {masked(database_url)} could not be brought up to date: {reason}") from exc
        log.info("schema_ready")

    async def _create_queues(self) -> None:
        """Create what is missing of the queues; also after a crash of the embedded SQS, which may have lost them."""
        from penstock.brokers.opening import create_queues

        self._queues = dict(await create_queues(self.settings, more=list(self.fleets)))

    def _places_of(self, user: Settings, sqs_url: str, access_key: str) -> dict[str, str]:
        """Variables that lead a process to this stack's queues; `penstock env` prints them too."""
        unset = sorted(LOCAL_DEFAULTS.keys() - user.model_fields_set)
        env = {f"PENSTOCK_{name.upper()}": LOCAL_DEFAULTS[name] for name in unset}
        for name in ("inbound_queue", "outbound_queue", "results_queue"):
            # A URL would lead to AWS or to an earlier port; its last part is the name.
            queue = getattr(user, name)
            env[f"PENSTOCK_{name.upper()}"] = queue if self.sqs_endpoint_url else queue.rsplit("/", 1)[-1]
        env["PENSTOCK_TRANSPORT_URL"] = self.transport_url
        if not access_key and urlsplit(sqs_url).hostname in (HOST, "localhost", "::1"):
            # Another SQS on this machine takes any, unless the caller names credentials.
            access_key = "" if _names_credentials() or user.sqs_access_key else "penstock:penstock"
        if access_key:
            env["PENSTOCK_SQS_ACCESS_KEY"] = access_key
        if sqs_url:  # the user's region is that of S3 and RDS too, and the embedded SQS takes any
            env["PENSTOCK_SQS_ENDPOINT_URL"] = sqs_url
            region = user.aws_region or os.environ.get("AWS_DEFAULT_REGION") or _sdk_profile().get("region")
            env["PENSTOCK_AWS_REGION"] = region or REGION
        return env

    async def _find_suggestion(self, env: Mapping[str, str]) -> None:
        """Ask for a task to try; a module that cannot be loaded is the workers' business."""
        if not self.apps:
            return
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.local.suggestion", *self.apps, env=env,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        try:
            async with asyncio.timeout(READY_WITHIN_SECONDS):
                output, _ = await process.communicate()
            self._suggestion = json.loads(output.splitlines()[-1])
        except (TimeoutError, ValueError, IndexError):
            pass
        finally:
            if process.returncode is None:
                process.kill()

    async def _wait_ready(self) -> None:
        waiting = {child.name: child for child in self._children.children}
        deadline = asyncio.get_running_loop().time() + READY_WITHIN_SECONDS
        while waiting:
            for child in list(waiting.values()):
                if child.exit_codes[:2] == WRONG_SETTINGS or len(child.exit_codes) >= GIVE_UP_AFTER_EXITS:
                    raise StackError(
                        f"{child.name} does not start (exit code {child.exit_codes[-1]}); its last words:\n"
                        + self.output.recent(child.name)
                    )
                if child.pid is not None and await asyncio.to_thread(answers, f"{child.url}/readyz"):
                    log.info("process_ready", name=child.name, pid=child.pid, metrics=f"{child.url}/metrics")
                    del waiting[child.name]
            self._children.check()
            if asyncio.get_running_loop().time() > deadline:
                raise StackError(
                    f"not ready after {READY_WITHIN_SECONDS:g} s: {', '.join(waiting)}; see the lines above"
                )
            await asyncio.sleep(0.05)

    @property
    def _api_url(self) -> str:
        return f"http://{_reachable(self.settings.http_host)}:{self._http_port}"

    def state(self) -> dict[str, Any]:
        """What `penstock ps --json` prints."""
        processes: list[dict[str, Any]] = []
        kept: list[Child | Service] = [*self._children.children, *self._services]
        for process in kept:
            metrics = f"{process.url}/metrics" if isinstance(process, Child) else None
            entry = {"name": process.name, "pid": process.pid, "metrics": metrics}
            state = "running" if process.pid else "restarting"
            processes.append(entry | {"state": state, "restarts": process.restarts, "started": process.started})
        key = self.settings.sqs_access_key
        env = self._places | _of_sdks(self._places) | self._example | self._control_environment()
        return {
            "api": self._api_url,
            "database_url": self.settings.require_database_url,
            "database_env": self._own_database,
            "transport_url": self.settings.transport.text,
            "sqs_endpoint_url": self.settings.sqs_endpoint_url,
            "sqs_access_key": key.get_secret_value() if key else None,
            "queues": self._queues,
            "suggestion": self._suggestion,
            "env": env | {"PENSTOCK_API_URL": self._api_url},
            "processes": processes,
        }

    def _publish(self) -> None:
        """Rewrite the state file after a restart; before everything is ready there is none."""
        if not self._ready:
            return
        try:
            self.data_dir.write_state(self.state())
        except OSError as exc:
            log.error("state_not_written", path=str(self.data_dir.state), error=str(exc))

    async def run(self, on_ready: Callable[[dict[str, Any]], None] = lambda state: None) -> None:
        """Start, call ``on_ready`` with the state, stay until SIGINT, SIGTERM or SIGHUP, stop. A second one leaves."""
        stop = asyncio.Event()
        starting = asyncio.create_task(self.start(), name="start")

        def on_signal() -> None:
            if stop.is_set():
                for child in self._children.children:
                    child.signal(signal.SIGKILL)
                for service in self._services:
                    if service.pid is not None:
                        os.kill(service.pid, service.stop_signal)
                os._exit(130)
            log.info("stack_stopping", hint="a second signal leaves at once")
            stop.set()
            starting.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            await asyncio.wait([starting])
            if starting.cancelled():
                return
            starting.result()
            on_ready(self.state())
            while not await is_set_within(stop, 1):
                self._children.check()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Drain and stop every process, then SQS, then Postgres. Safe to call twice, or after half a start."""
        self._ready = False
        await self._children.stop(self._grace_seconds)
        for service in reversed(self._services):
            await asyncio.to_thread(service.stop)
        if self._children.children:
            log.info("stack_stopped")
        self._services = []
        self._held.close()


def _reachable(host: str) -> str:
    host = {"0.0.0.0": HOST, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _names_credentials() -> bool:
    return any(os.environ.get(name) for name in _CREDENTIAL_VARIABLES)


def _has_credentials() -> bool:
    """Whether variables or files lead the SDK to credentials; those of an instance are not looked for."""
    return _names_credentials() or not _CREDENTIAL_OPTIONS.isdisjoint(_sdk_profile())


def _sdk_profile() -> Mapping[str, str]:
    """The profile in use of the user's AWS files; empty where there is none, or they cannot be read."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    with contextlib.suppress(BotoCoreError):
        return dict(Session().get_scoped_config())
    return {}


def _of_sdks(places: Mapping[str, str]) -> dict[str, str]:
    """Variables by which SQS clients that know nothing of Penstock find the access key."""
    key_id, colon, secret = places.get("PENSTOCK_SQS_ACCESS_KEY", "").partition(":")
    if not colon:
        return {}
    return {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": secret, "AWS_EC2_METADATA_DISABLED": "true"}


def _no_proxy() -> dict[str, str]:
    """The SDK would send calls to 127.0.0.1 through the proxy of a corporate network."""
    if not any(os.environ.get(name) for name in ("HTTP_PROXY", "http_proxy")):
        return {}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, (given, HOST, "localhost")))
    return {"NO_PROXY": hosts, "no_proxy": hosts}
