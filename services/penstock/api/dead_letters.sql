-- Reading what Postgres knows of messages in a dead-letter queue.

-- name: find_receipts
-- $1 message ids. Those that were accepted, as far as receipts are kept.
select message_id from penstock.inbound_receipt where message_id = any($1::text[]);

-- name: find_unique_tasks
-- $1 actions, $2 unique keys, in parallel. The tasks that hold them.
select k.action, k.key, k.task_id
from unnest($1::text[], $2::text[]) i (action, key) join penstock.unique_key k on k.action = i.action and k.key = i.key;
