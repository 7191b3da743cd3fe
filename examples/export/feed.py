"""Insert objects, and enqueue an export of each through both entry points: HTTP and the inbound queue.

`python -m examples.export.feed --objects 1000` feeds the stack that `penstock up` has started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from examples.export.database import DATABASE_URL, ExportDatabase
from penstock import Client, InboundClient, RpcError, Unavailable
from penstock.local.state import DataDir
from penstock.protocol.errors import INTERNAL_ERROR, PenstockError
from penstock.settings.values import is_loopback

ACTION = "export"
CHUNK = 500
_TRIES = 6
_AWAY = OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError
_REGION = "us-east-1"  # what the embedded SQS signs for; it takes any

Progress = Callable[[int], None]


class FeedError(PenstockError):
    """Not everything could be enqueued."""


@dataclass(frozen=True)
class Fed:
    """What was fed. ids: of the objects. duplicates: enqueues over HTTP that met a task enqueued before."""

    ids: range
    over_http: int
    through_queue: int
    duplicates: int


async def feed(
    state: Mapping[str, Any],
    count: int,
    *,
    http_share: float = 0.5,
    seed: int = 0,
    database_url: str | None = None,
    on_progress: Progress = lambda count: None,
) -> Fed:
    """Insert objects and enqueue their exports, ``http_share`` of them over HTTP and the others through the queue.

    state: what `penstock ps --json` prints. database_url: of the objects; None for the one that the stack made.
    Raises FeedError, Unavailable. Enqueueing an object twice is harmless, so what may have failed is sent again.
    """
    database_url = database_url or state["env"].get(DATABASE_URL)
    if database_url is None:
        raise FeedError(f"this stack made no database for the example, for it uses one of yours: set {DATABASE_URL}")
    database = ExportDatabase(database_url)
    try:
        ids = await add_objects(database, count, seed=seed)
    finally:
        await database.close()
    http, queue = _share_out(ids, http_share)
    os.environ.update(_no_proxy(state["sqs_endpoint_url"]))
    duplicates, _ = await asyncio.gather(
        _over_http(state["api"], http, on_progress), _through_queue(state, queue, on_progress)
    )
    return Fed(ids, len(http), len(queue), duplicates)


async def add_objects(database: ExportDatabase, count: int, *, seed: int) -> range:
    """The ids of new objects; they are inserted again for some seconds while Postgres goes away. Raises FeedError."""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(0.25 * 2 ** (attempt - 1))
        try:
            return await database.add_objects(count, seed=seed)
        except _AWAY as exc:
            reason = exc
    raise FeedError(f"the database of the example is unavailable: {reason}") from reason


def _share_out(ids: Sequence[int], http_share: float) -> tuple[list[int], list[int]]:
    """Ids for HTTP and for the queue, mixed evenly."""
    http: list[int] = []
    queue: list[int] = []
    for position, object_id in enumerate(ids):
        door = http if int((position + 1) * http_share) > int(position * http_share) else queue
        door.append(object_id)
    return http, queue


async def _over_http(url: str, ids: Sequence[int], on_progress: Progress) -> int:
    duplicates = 0
    with Client(url, api_key=os.environ.get("PENSTOCK_API_KEY")) as client:
        for chunk in _chunks(ids):
            answers = await _again_while_away(client, [("submit:export", {"objectID": each}) for each in chunk])
            refused = [answer for answer in answers if isinstance(answer, RpcError)]
            if refused:
                raise FeedError(f"the api refused {len(refused)} of {len(chunk)} tasks, the first: {refused[0]}")
            duplicates += sum(answer["duplicate"] for answer in answers)
            on_progress(len(chunk))
    return duplicates


async def _again_while_away(client: Client, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """The answers, in order; calls are repeated for some seconds while the api or Postgres is unavailable."""
    answers: dict[int, Any] = {}
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(0.25 * 2 ** (attempt - 1))
        left = [place for place in range(len(calls)) if place not in answers or _was_away(answers[place])]
        try:
            given = await asyncio.to_thread(client.batch, [calls[place] for place in left])
        except Unavailable:
            if attempt == _TRIES - 1:
                raise
            continue
        answers.update(zip(left, given, strict=True))
        if not any(_was_away(answer) for answer in given):
            break
    return [answers[place] for place in range(len(calls))]


def _was_away(answer: object) -> bool:
    return isinstance(answer, RpcError) and answer.code == INTERNAL_ERROR


async def _through_queue(state: Mapping[str, Any], ids: Sequence[int], on_progress: Progress) -> None:
    # The key is the one that submit:export derives, so an object is one task through either entry point; the id is
    # text here, as in the older convention.
    client = InboundClient(
        state["queues"]["inbound"], state["sqs_endpoint_url"], _REGION, access_key=state["sqs_access_key"]
    )
    async with client:
        for chunk in _chunks(ids):
            await client.enqueue_many(
                {"action": ACTION, "payload": {"objectID": str(each)}, "unique_key": str(each)} for each in chunk
            )
            on_progress(len(chunk))


def _no_proxy(endpoint_url: str | None) -> dict[str, str]:
    """What keeps the SDK from sending calls to an SQS on this machine through a proxy."""
    if endpoint_url is None or not is_loopback(urlsplit(endpoint_url).hostname or ""):
        return {}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = given if "127.0.0.1" in given.split(",") else ",".join(filter(None, (given, "127.0.0.1", "localhost")))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def share(text: str) -> float:
    """A number from 0 to 1, for argparse."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.export.feed", description=__doc__)
    parser.add_argument("--objects", type=positive, default=1000, metavar="N", help="how many (default 1000)")
    parser.add_argument(
        "--http-share", type=share, default=0.5, metavar="SHARE", help="of them over HTTP, 0 to 1 (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="other numbers make other data (default 0)")
    parser.add_argument("--data-dir", type=Path, help="folder of the stack (default .penstock)")
    options = parser.parse_args(arguments)
    folder = DataDir(options.data_dir)
    state = folder.read_state()
    if state is None:
        print(f"nothing runs in {folder.path}: start it with `penstock up --detach --app examples.export`",
              file=sys.stderr)  # fmt: skip
        return 1
    started = time.perf_counter()
    try:
        fed = asyncio.run(
            feed(
                state, options.objects, http_share=options.http_share, seed=options.seed,
                database_url=os.environ.get(DATABASE_URL),
            )
        )  # fmt: skip
    except (PenstockError, OSError) as exc:
        print(f"not everything was fed: {exc}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(
        f"objects {fed.ids[0]} to {fed.ids[-1]} inserted and enqueued in {seconds:.1f} s: "
        f"{fed.over_http} over HTTP, {fed.through_queue} through the queue"
    )
    print("watch them: penstock stats" + (f" --data-dir {str(options.data_dir)!r}" if options.data_dir else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
