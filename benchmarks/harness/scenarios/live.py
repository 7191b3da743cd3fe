"""live: producers and the pipeline at once, half of the tasks over HTTP, half through the queue."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.actions import NOOP_INBOUND
from benchmarks.harness.connections import Connections
from benchmarks.harness.producers import post_batches, send_inbound, together
from benchmarks.harness.rig import Bench, rig_up
from penstock.client.inbound import InboundClient

_SENDERS = 4  # over HTTP, and as many through the queue


async def live(bench: Bench) -> dict[str, Any]:
    """HTTP batches and the client's ``enqueue_many`` into the inbound queue, as fast as each accepts them."""
    by_http = bench.options.tasks // 2
    by_inbound = bench.options.tasks - by_http
    async with rig_up(bench) as rig:
        state = rig.stack.state()
        before, inbound_before = await rig.settled(), await rig.count("ENQUEUED", action=NOOP_INBOUND)
        advance = bench.bar("enqueueing", bench.options.tasks)
        client = InboundClient(
            state["queues"]["inbound"], state["sqs_endpoint_url"], rig.settings.aws_region,
            access_key=state["sqs_access_key"],
        )  # fmt: skip
        async with Connections(rig.api, _SENDERS) as connections, client:

            async def http() -> float:
                await post_batches(connections, by_http, _SENDERS, advance)
                return rig.seconds()

            async def inbound() -> float:
                await send_inbound(client, by_inbound, _SENDERS, advance)
                return rig.seconds()

            async def accepted() -> float:
                await rig.wait_count("ENQUEUED", NOOP_INBOUND, inbound_before + by_inbound)
                return rig.seconds()

            async def settled() -> float:
                await rig.wait_settled(before + bench.options.tasks)
                return rig.seconds()

            await rig.begin()
            async with together() as group:
                by_door = [group.create_task(door()) for door in (http, inbound, accepted)]
                all_settled = group.create_task(settled())
        http_seconds, sent_seconds, accepted_seconds = (task.result() for task in by_door)
        seconds = all_settled.result()
        used = await rig.end(bench.options.tasks)
    return {
        "tasks": bench.options.tasks,
        "workers": bench.options.workers,
        "schedulers": bench.options.schedulers,
        "seconds": round(seconds, 2),
        "tasks_per_second": round(bench.options.tasks / seconds),
        "settled_behind_producers_seconds": round(seconds - max(http_seconds, sent_seconds), 2),
        "http": {"tasks": by_http, "accepted_per_second": round(by_http / http_seconds)},
        "inbound": {
            "tasks": by_inbound,
            "sent_per_second": round(by_inbound / sent_seconds),
            "accepted_per_second": round(by_inbound / accepted_seconds),
        },
        "cost": used,
    }
