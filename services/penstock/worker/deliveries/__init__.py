"""Deliveries (decisions/021): built-in actions that any worker can run, as PENSTOCK_DELIVERIES names them.

One is a module of this package, such as `sqs`, imported only by a worker that runs it, and a name in
``protocol.task.BUILT_IN_ACTIONS`` (and in ``registry.EXTRAS``, where it needs a library beyond a plain worker's). Its
``add_to(deliveries)`` opens nothing yet, for there is no event loop: ``deliveries.at_open`` and ``at_close`` do, and
``deliveries.http`` is the guarded client. The handler is what ``@penstock.action`` takes; it raises NotDelivered for
what may pass, with a delay where the other side named one, and Undeliverable for what will not. Both texts name the
value seen and the next step, and hold no secret.
"""
