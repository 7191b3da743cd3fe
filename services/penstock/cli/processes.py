"""`penstock submitter`, `scheduler` and so on, one process each, and what they need: the schema, queues, keys."""

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.common import Database, DatabaseUrlOption, DataDirOption, Shown, folder_of, load_settings, running
from penstock.cli.local import ReloadOption
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.protocol.requests import given

LoopsOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=256, help="Batches of messages, or of due tasks, handled at once; default PENSTOCK_CONCURRENCY."
    ),
]
LogLevelOption = Annotated[
    str | None, typer.Option(help="debug, info, warning or error; default PENSTOCK_LOG_LEVEL, else info.")
]
_LEVELS = {"warn": "warning", "trace": "debug", "off": "error", "fatal": "error"}
# The variable of kafka-message-scheduler or clockwork -> our setting, and how to convert its value.
Older = Mapping[str, tuple[str, Callable[[str], Any]]]
KAFKA_MESSAGE_SCHEDULER: Older = {
    "KAFKA_BROKERS": ("kafka_brokers", str),
    "SCHEDULE_TOPICS": ("kafka_source_avro_topics", str),
    "JSON_SCHEDULE_TOPICS": ("kafka_source_json_topics", str),
    "CONSUMER_GROUP_ID": ("kafka_source_group", str),
    "SECURITY_PROTOCOL": ("kafka_security_protocol", str.lower),
    "OTEL_EXPORTER_PROMETHEUS_PORT": ("metrics_port", str),
    "KMS_LOGGING_LEVEL": ("log_level", lambda text: _LEVELS.get(text.lower(), text.lower())),
}
CLOCKWORK: Older = {
    "KAFKA_BROKERS": ("kafka_brokers", str),
    "KAFKA_CONSUMER_GROUP": ("clockwork_group", "{}-consumers".format),
    "SCHEDULE_CREATE_KAFKA_TOPIC": ("clockwork_create_topic", str),
}


def _looping(name: str, help: str) -> Callable[..., None]:
    def command(loops: LoopsOption = None, log_level: LogLevelOption = None) -> None:
        _run(name, log_level, loops=loops)

    command.__doc__ = help
    return command


submitter = _looping("submitter", "Move tasks from the inbound queue into Postgres.")
scheduler = _looping("scheduler", "Claim due tasks in Postgres and send them to the outbound queue.")
resulter = _looping("resulter", "Move results from the results queue into Postgres.")
supervisor = _looping("supervisor", "Repair stale tasks, remove old ones, export gauges.")
api = _looping("api", "Serve JSON-RPC over HTTP.")
run = _looping("run", "Run submitter, scheduler, resulter, supervisor and api in one process, for small installations.")


def worker(
    app: Annotated[list[str] | None, typer.Option(metavar="MODULE")] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1)] = None,
    loops: LoopsOption = None,
    processes: Annotated[int | None, typer.Option(min=1)] = None,
    recycle_after: Annotated[int | None, typer.Option(metavar="TASKS", min=1)] = None,
    max_memory: Annotated[int | None, typer.Option(metavar="BYTES")] = None,
    reload: ReloadOption = False,
    log_level: LogLevelOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Run tasks from the outbound queue with the handlers of the --app modules; needs SQS, no database.

    Uses the queues of the settings, else those of the stack running in --data-dir. Modules of the current folder can
    be named. PENSTOCK_DELIVERIES adds built-in actions such as http.request.

    app: Module with handlers, e.g. myapp.tasks. Repeatable.
    queue: Take tasks from this queue of a route, by name or URL; default PENSTOCK_OUTBOUND_QUEUE.
    concurrency: Number of tasks run at once; default PENSTOCK_WORKER_CONCURRENCY, else 100.
    processes: Child processes for handlers with process=True; default PENSTOCK_WORKER_PROCESSES, else one per CPU.
    recycle_after: Replace a child process after so many calls; default PENSTOCK_PROCESS_RECYCLE_AFTER, else never.
    max_memory: Replace a child process with more memory after its task; default PENSTOCK_PROCESS_MAX_MEMORY_BYTES.
    """
    if reload:
        from penstock.cli.reload import run_reloading
        from penstock.runtime.logs import setup_logging

        settings = load_settings()
        setup_logging("reload", level=(log_level or settings.log_level).lower(), form=settings.log_format)
        raise typer.Exit(run_reloading([word for word in sys.argv[1:] if word != "--reload"]))
    sys.path.insert(0, os.getcwd())
    places = {"transport_url", "sqs_endpoint_url", "aws_region", "inbound_queue", "outbound_queue", "results_queue"}
    is_placed = data_dir is None and places & load_settings().model_fields_set
    if not is_placed and (state := running(data_dir)) is not None:
        # The AWS credentials stay, for handlers that call other services: the stack's queues have a key of their own.
        os.environ.update({name: value for name, value in state["env"].items() if not name.startswith("AWS_")})
        typer.echo(f"penstock: worker of the stack in {folder_of(data_dir).path}", err=True)
    _run(
        "worker", log_level, loops=loops, apps=app or (), outbound_queue=queue, worker_concurrency=concurrency,
        worker_processes=processes, process_recycle_after=recycle_after, process_max_memory_bytes=max_memory,
    )  # fmt: skip


def _run(
    name: str, log_level: str | None = None, *, loops: int | None = None, apps: Sequence[str] = (), **overrides: Any
) -> None:
    """Run a process, and exit with its code. overrides: of settings; None leaves one unchanged."""
    from penstock.cli.run import run_process

    settings = load_settings(**overrides, log_level=log_level and log_level.lower())
    raise typer.Exit(run_process(name, settings, loops=loops, apps=apps))


def older_settings(names: Older, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings from the older variables, unless our own set them. Raises SettingsError for Java key stores."""
    from penstock.settings.values import PREFIX  # here, since pydantic doubles the time of --help

    if environ.get("SECURITY_PROTOCOL", "").lower().endswith("ssl") and PREFIX + "KAFKA_SSL_CA_FILE" not in environ:
        for name in ("KEYSTORE_LOCATION", "TRUSTSTORE_LOCATION"):
            if environ.get(name):
                raise SettingsError(
                    f"{name} names a Java key store, which librdkafka cannot read: export it as PEM (`keytool "
                    f"-exportcert -rfc`, `openssl pkcs12`) and set {PREFIX}KAFKA_SSL_CA_FILE, and for a client "
                    f"certificate {PREFIX}KAFKA_SSL_CERTIFICATE_FILE and {PREFIX}KAFKA_SSL_KEY_FILE"
                )
    return {
        setting: convert(environ[name])
        for name, (setting, convert) in names.items()
        if environ.get(name) and PREFIX + setting.upper() not in environ
    }


def kafka_source(log_level: LogLevelOption = None) -> None:
    """Read the schedule topics of kafka-message-scheduler and keep the records until they are due.

    Reads its environment variables too: docs/moving-from-kafka-message-scheduler.md.
    """
    _run("kafka-source", **older_settings(KAFKA_MESSAGE_SCHEDULER, os.environ) | given(log_level=log_level))


def clockwork_source(log_level: LogLevelOption = None) -> None:
    """Read schedules from clockwork's create topic and keep them until they are due.

    Reads its environment variables too: docs/moving-from-clockwork.md.
    """
    _run("clockwork-source", **older_settings(CLOCKWORK, os.environ) | given(log_level=log_level))


def migrate(
    revision: str = "head",
    down_to: str | None = None,
    database_url: DatabaseUrlOption = None,
    sql: bool = False,
    grant: Annotated[str | None, typer.Option(metavar="ROLE")] = None,
) -> None:
    """Bring the schema in Postgres up to date. Safe to repeat.

    revision: Revision to upgrade to.
    down_to: Downgrade to this revision instead; `base` drops everything.
    sql: Print the SQL of an upgrade from an empty schema, without running it.
    grant: Grant an existing role the rights that the processes need, without the right to change the schema.
    """
    from penstock.db import migrate as migrations
    from penstock.db.connecting import connecting_options

    if grant is not None and (sql or down_to is not None):
        raise typer.BadParameter("--grant follows an upgrade; it does not go with --sql or --down-to")
    settings = load_settings(database_url=database_url)
    if sql:
        if down_to is not None:
            raise typer.BadParameter("--sql prints an upgrade; it does not go with --down-to")
        typer.echo(migrations.upgrade_sql(revision, schema=settings.database_schema))
        return
    url, options = settings.require_database_url, connecting_options(settings)
    try:
        if down_to is not None:
            migrations.downgrade(url, down_to, **options)
        else:
            migrations.upgrade(url, revision, **options)
    except Exception as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise Unavailable(f"the migration did not finish, what it had changed by then stays: {reason}") from exc
    typer.echo(f"schema is at {down_to or revision}")
    if grant is not None:
        asyncio.run(migrations.grant(url, grant, **options))
        typer.echo(f"role {grant} may do what the processes need")


def partition_tasks(
    partitions: Annotated[int, typer.Argument(metavar="PARTITIONS", min=1, max=32)],
    database_url: DatabaseUrlOption = None,
) -> None:
    """Divide the table of live tasks into hash partitions, or back, while everything runs. Safe to repeat.

    As the owner of the schema. When it is worth it, and how it goes: docs/postgres.md.

    partitions: In how many tables new tasks are stored; 1: one.
    """
    from penstock.db.connecting import connecting_options
    from penstock.db.partitions import partition_tasks as divide

    settings = load_settings(database_url=database_url)
    url, options = settings.require_database_url, connecting_options(settings)
    asyncio.run(divide(url, partitions, report=typer.echo, **options))


def grants(
    role: Annotated[str, typer.Option(metavar="NAME")], process: Annotated[list[str], typer.Option(metavar="KIND")]
) -> None:
    """Print the SQL that gives a role what one kind of process needs and nothing else. Changes nothing.

    Run it as the owner of the schema, again after each upgrade. A worker needs no role.

    role: Existing role that the process connects as.
    process: submitter, scheduler, resulter, supervisor, api, kafka-source or clockwork-source. Repeatable.
    """
    from penstock.db.migrate import grants as statements_of

    statements = statements_of(role, process, schema=load_settings().database_schema)
    typer.echo("".join(f"{line};\n" for line in ("begin", *statements, "commit")), nl=False)


def create_queues(*, queue: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None, shown: Shown) -> None:
    """Create the three queues and their dead-letter queues at the broker of PENSTOCK_TRANSPORT_URL.

    SQS: at PENSTOCK_SQS_ENDPOINT_URL, for local endpoints such as ElasticMQ, ministack or moto; on AWS use terraform/,
    which also sets policies and alarms. RabbitMQ and Kafka: only needed if the processes may not create queues.

    queue: Also create this queue, for a route. Repeatable.
    """
    from penstock.brokers.opening import create_queues as create

    shown.show(asyncio.run(create(load_settings(), more=queue or ())))


def payload_key(shown: Shown) -> None:
    """Create a key for PENSTOCK_PAYLOAD_KEYS and print it; it is not stored anywhere."""
    from penstock.settings.payload_texts import fingerprint, new_key, read_key

    key = new_key()
    key_id = fingerprint(read_key(key))
    note = f"key id {key_id}, as shown in errors and by `penstock doctor`; store the key like a password"
    shown.show({"key": key, "id": key_id}, lambda _: typer.echo(key))
    if not shown.as_json:
        typer.echo(note, err=True)


def claim_key(*, accept_older_days: Annotated[float, typer.Option(min=0, max=365)] = 14.0, database: Database) -> None:
    """Create a new key for the claim ids that workers are given; schedulers use it within a minute.

    With --accept-older-days 0, after a leak of the database, results of tasks in flight are refused: those tasks run
    again.

    accept_older_days: Days for which ids made with older keys are accepted.
    """
    # By default as long as SQS keeps a message at most, so no result under an older id can arrive later.
    seconds = accept_older_days * 86_400
    older = database.run(lambda session: session.value("change_claim_key", secrets.token_bytes(32), seconds))
    said = f"created a key; {older} older keys are accepted for {accept_older_days:g} days"
    database.show({"older": older, "accepted_seconds": seconds}, lambda _: typer.echo(said))
