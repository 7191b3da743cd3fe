"""A producer for asyncio: any number of tasks share one, and librdkafka's batches with it.

librdkafka gathers records for 5 ms, sends them by partition, and reports them to the caller of ``poll``: here a thread
of its own, which hands over all reports of one ``poll`` at once, since waking the event loop is what costs.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.brokers.kafka.library import BATCH_REFUSALS, REFUSALS, error_text, open_client
from penstock.brokers.kafka.messages import Delivery, Record
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log

_MOST = "batch.num.messages"
_POLL_SECONDS = 0.1
_FULL_PAUSE_SECONDS = 0.02
_UNHEARD_OF = Delivery(error="the producer ended before it was heard whether the record arrived")


class KafkaProducer:
    """Publishes records; what one caller sends to one partition arrives in its order, unless ordered is False.

    The limit of a topic holds for a batch, and librdkafka fills batches up to 1 MB from all that is sent. The records
    of one that is refused are published again one by one, and with an order also what the caller sent behind them.

    config: made by :func:`penstock.brokers.kafka.library.producer_config`. Opened by :meth:`open`, or by the first
    send, which then often takes half a second: librdkafka asks for a producer's id before a broker is connected, and
    again after so long.
    """

    def __init__(self, config: Mapping[str, Any], *, ordered: bool = True) -> None:
        self._config = config
        self._ordered = ordered
        self._engine: _Engine | None = None
        self._single: KafkaProducer | None = None  # opened when a broker has refused a batch

    def open(self) -> None:
        """Begin to connect, by the running loop. Raises SettingsError where Kafka cannot be used at all."""
        if self._engine is not None and self._engine.broken:
            # librdkafka never uses an idempotent producer again after an error that it calls fatal.
            log.warning("kafka_producer_renewed", reason=self._engine.broken)
            threading.Thread(target=self._engine.stop, args=(0.0,), name="kafka-producer-stop", daemon=True).start()
            self._engine = None
        if self._engine is None:
            self._engine = _Engine(self._config)

    async def send(self, records: Sequence[Record]) -> list[Delivery]:
        """Publish; returns the outcome of each record, in their order. Raises SettingsError, Unavailable."""
        if not records:
            return []
        self.open()
        assert self._engine is not None
        deliveries = await self._engine.send(records)
        refused = [at for at, delivery in enumerate(deliveries) if delivery.in_batch]
        if refused and self._config.get(_MOST) != 1:
            if self._single is None:
                self._single = KafkaProducer({**self._config, _MOST: 1})
            again = range(refused[0], len(records)) if self._ordered else refused
            alone = await self._single.send([records[at] for at in again])
            for at, delivery in zip(again, alone, strict=True):
                deliveries[at] = delivery
        return deliveries

    async def close(self, seconds: float = 10) -> None:
        """Wait for the records under way, at most so long."""
        if self._single is not None:
            await self._single.close(seconds)
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop, seconds)


class _Engine:
    """One producer of librdkafka and the thread that asks it for its reports."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.broken: str | None = None
        self._loop = asyncio.get_running_loop()
        self._producer = open_client("Producer", dict(config) | {"error_cb": self._erred})
        self._reported: list[tuple[asyncio.Future[Delivery], Delivery]] = []
        self._pending: set[asyncio.Future[Delivery]] = set()
        self._stopping = threading.Event()
        self._last_seconds = 0.0
        self._thread = threading.Thread(target=self._poll, name="kafka-producer", daemon=True)
        self._thread.start()

    async def send(self, records: Sequence[Record]) -> list[Delivery]:
        futures: list[asyncio.Future[Delivery]] = [self._loop.create_future() for _ in records]
        self._pending.update(futures)
        try:
            for record, future in zip(records, futures, strict=True):
                while not self._produce(record, future):
                    await asyncio.sleep(_FULL_PAUSE_SECONDS)  # the queue of librdkafka is full: some must arrive first
                    if self._stopping.is_set():
                        raise Unavailable("the Kafka producer was closed")
            return [await future for future in futures]
        finally:
            self._pending.difference_update(futures)

    def stop(self, seconds: float) -> None:
        """Blocks until all is delivered, or for so long, then ends the thread; the rest is reported as not there."""
        self._last_seconds = seconds
        self._stopping.set()
        self._thread.join()

    def _produce(self, record: Record, future: asyncio.Future[Delivery]) -> bool:
        more: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        if record.headers:
            more["headers"] = list(record.headers)
        try:
            self._producer.produce(
                record.topic, record.value, record.key, on_delivery=partial(self._report, future), **more
            )
        except BufferError:
            return False
        except Exception as exc:  # the client refuses this record at once: its size, the name of its topic
            error = exc.args[0] if exc.args and hasattr(exc.args[0], "name") else None
            refused = error.name() in REFUSALS if error is not None else isinstance(exc, TypeError | ValueError)
            future.set_result(Delivery(error=error_text(exc), refused=refused))
        return True

    def _report(self, future: asyncio.Future[Delivery], error: Any, message: Any) -> None:
        """Called by librdkafka, within a poll or a flush, so in our thread alone."""
        if error is None:
            delivery = Delivery(message.partition(), message.offset())
        else:
            name = error.name()
            delivery = Delivery(error=error_text(error), refused=name in REFUSALS, in_batch=name in BATCH_REFUSALS)
        self._reported.append((future, delivery))

    def _poll(self) -> None:
        try:
            while not self._stopping.is_set():
                self._producer.poll(_POLL_SECONDS)
                self._hand_over()
            self._producer.flush(self._last_seconds)
        except Exception as exc:  # the library raises after an error that it calls fatal
            self.broken = self.broken or error_text(exc)
            log.warning("kafka_producer_broken", reason=self.broken)
        self._stopping.set()
        self._producer.purge()
        with suppress(Exception):
            self._producer.flush(1)
        self._hand_over()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: _settle([(future, _UNHEARD_OF) for future in self._pending]))

    def _hand_over(self) -> None:
        reported, self._reported = self._reported, []
        if reported and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, reported)

    def _erred(self, error: Any) -> None:
        if error.fatal():
            self.broken = error_text(error)
        log.warning("kafka_away", client="producer", reason=error_text(error))


def _settle(reported: Sequence[tuple[asyncio.Future[Delivery], Delivery]]) -> None:
    for future, delivery in reported:
        if not future.done():
            future.set_result(delivery)
