"""Deliveries: built-in actions such as ``http.request`` that any worker can run, as PENSTOCK_DELIVERIES names them.

None is on by default: a worker that runs one acts in the network for every caller that may enqueue (decision 021).
One delivery is one module of this package, imported only by a worker that runs it, and a name in
``protocol.task.BUILT_IN_ACTIONS`` (and in ``registry.EXTRAS``, where it needs a library beyond a plain worker's)::

    def add_to(deliveries: Deliveries) -> None:
        publisher = Publisher(deliveries.settings)         # opens nothing yet: there is no event loop
        deliveries.at_open(publisher.open)                 # where the first task would wait for a connection
        deliveries.at_close(publisher.close)               # async; after the worker has drained
        deliveries.action("kafka.publish", publisher.publish, batch=500, linger=0.01, timeout=30)

The handler is what ``@penstock.action`` takes. It raises :class:`NotDelivered` for what may pass (with a delay, where
the other side named one), :class:`Undeliverable` for what will not; both texts name the value seen and the next step,
and hold no secret. ``deliveries.http`` is the worker's guarded HTTP client, which raises these two as well.
"""
