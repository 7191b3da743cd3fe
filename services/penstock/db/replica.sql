-- How far a replica follows.

-- name: read_log_position
-- Of the primary. Behind a page's header, of 24 or 40 bytes, nothing is written yet, and a replica stands before it.
select (position - case when position % block in (24, 40) then position % block else 0 end)::bigint
from (select pg_current_wal_insert_lsn() - '0/0'::pg_lsn as position, current_setting('wal_block_size')::int as block) p;

-- name: read_replayed_position
-- Null from a server that is no replica.
select case when pg_is_in_recovery() then (pg_last_wal_replay_lsn() - '0/0'::pg_lsn)::bigint end;
