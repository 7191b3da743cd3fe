"""The life of a task in Postgres: enqueue, claim, settle, order, reschedule, bulk, and its methods."""
