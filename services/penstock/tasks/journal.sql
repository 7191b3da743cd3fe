-- Journals: the finished durable steps of tasks, and suspensions that spend no attempt. task.journal is null for a task without
-- any, so that plain tasks cost nothing; else it is the claim up to which reports of steps count no more, or minus the claim
-- up to which those of failed steps count no more.

-- name: record_entries
-- $1 ids, $2 claims, $3 names, $4 repetitions (distinct with the ids), $5 positions, $6 entries as JSON text, $7 whether each
-- failed, $8 when each began in epoch seconds or null, $9 seconds or null, $10 tries, $11 workers or null, $12 how many entries
-- a task may have, $13 how many bytes, those that come together counted in their order. Also of an older claim than the current one: the step has run. That of the newest
-- claim counts, for its attempt has gone on with it. A task that has begun a journal does not expire any more, and a step of the
-- current claim is a heartbeat if it is the first. Returns the (id, name, repetition) of those that have no room.
with given as materialized (
    select * from unnest($1::bigint[], $2::bigint[], $3::text[], $4::int[], $5::int[], $6::text[], $7::bool[],
                         $8::float8[], $9::float8[], $10::int[], $11::text[])
        g (task_id, claim, name, repetition, position, entry, failed, began_at, seconds, tries, worker)
), held as materialized (
    select t.id, claim, coalesce(journal, 0) as floor,
           state::text = 'ACQUIRED' and case when (t.id, claim) in (select task_id, claim from given) then true else false end
               as is_taken,
           journal is null as is_new, expires_at is not null as may_expire, heartbeat_at is null as is_unseen
    from {asked} join penstock.task t on t.id = any(array[u.id])
), marked as (
    update penstock.task t
    set journal = coalesce(t.journal, 0), expires_at = null,
        heartbeat_at = case when h.is_taken and t.claim = h.claim and t.state::text = 'ACQUIRED'  -- still, behind a lock
                            then coalesce(t.heartbeat_at, now()) else t.heartbeat_at end
    from held h
    where t.id = any(array[h.id]) and (h.is_new or h.may_expire or h.is_taken and h.is_unseen)
), known as materialized (
    select task_id, name, repetition, octet_length(entry) as bytes from penstock.journal_entry
    where task_id = any($1::bigint[])
), sizes as materialized (
    select task_id, count(*) as entries, sum(bytes) as bytes from known group by task_id
), counted as materialized (
    select g.*,
           case when (g.task_id, g.name, g.repetition) in (select task_id, name, repetition from known) then true else false end
               as is_known
    from given g join held h on h.id = g.task_id
    where g.claim > case when g.failed then abs(h.floor) else h.floor end and g.claim <= h.claim
), accepted as materialized (
    select c.*, (coalesce(s.entries, 0) + count(*) filter (where not c.is_known) over so_far > $12::int
                 or coalesce(s.bytes, 0) + sum(octet_length(c.entry)) filter (where not c.is_known) over so_far > $13::int)
                is true and not c.is_known as has_no_room
    from counted c left join sizes s on s.task_id = c.task_id
    window so_far as (partition by c.task_id order by c.position, c.name, c.repetition)
), stored as (
    insert into penstock.journal_entry as j (task_id, name, repetition, position, claim, entry, failed, began_at, seconds,
        tries, worker)
    select task_id, name, repetition, position, claim, entry, failed, to_timestamp(began_at), seconds, tries, worker
    from accepted
    where not has_no_room
    order by task_id, name, repetition
    on conflict (task_id, name, repetition) do update
    set position = excluded.position, claim = excluded.claim, entry = excluded.entry, failed = excluded.failed,
        began_at = excluded.began_at, seconds = excluded.seconds, tries = excluded.tries, worker = excluded.worker,
        recorded_at = now()
    where j.claim < excluded.claim
)
select task_id, name, repetition from accepted where has_no_room;

-- name: read_journals
-- $1 ids, $2 how many bytes of entries; those behind them come without.
select task_id, name, repetition, position, claim, failed, began_at, seconds, tries, worker, recorded_at,
       case when sum(octet_length(entry)) over (order by task_id, position, name, repetition) - octet_length(entry)
                 < $2::bigint then entry end as entry
from penstock.journal_entry where task_id = any($1::bigint[]) order by task_id, position, name, repetition;

-- name: find_excused
-- $1 ids, $2 claims. Of claims that still hold their task: whether the journal has grown since the claim, or the task is not
-- suspect yet: a message may come again though no worker has begun it.
select t.id, t.claim,
       not t.suspect or exists (select from penstock.journal_entry j where j.task_id = t.id and j.claim = t.claim) as excused
from {pairs} join penstock.task t on {held};

-- name: suspend_attempts
-- $1 ids (distinct), $2 claims, $3 delays in seconds, $4 instants or null, which come first, $5 workers or null,
-- $6 whether the worker of each may have died. ACQUIRED back to the state that the claim came from, its attempt given back:
-- the task goes on at that time, or now if it is in the past: no claim begins before the second day of year 1. One whose worker died is known to have steps from then on, and is a suspect the next time,
-- unless its journal has grown: a worker that dies leaves many tasks that it has not even begun.
-- The worker has its action: what is noted of workers without it ends.
with changed as (
    update penstock.task t
    set state = case when t.attempts = 1 then 'SCHEDULED' else 'ERROR' end::penstock.task_state,
        attempts = t.attempts - 1,
        run_at = greatest(now(), coalesce(r.until, now() + make_interval(secs => r.delay)), {cancelled_by}),
        claimed_at = null, heartbeat_at = null, progress = null, updated_at = now(), route = null, gate = null,
        worker = coalesce(r.worker, t.worker),
        journal = case when r.suspect then coalesce(t.journal, 0) else t.journal end,
        suspect = t.suspect or r.suspect and t.journal is not null and not exists (
            select from penstock.journal_entry j where j.task_id = t.id and j.claim = t.claim)
    from (select * from unnest($1::bigint[], $2::bigint[], $3::float8[], $4::timestamptz[], $5::text[], $6::bool[])
              r (id, claim, delay, until, worker, suspect) order by id) r
    where {held}
    returning t.id, t.action, t.workflow, t.state::text as state, true as moved
), {notified}, {renoted}
select id, action, state from changed;

-- name: rewind_journal
-- $1 id, $2 name, $3 repetition of a step. That entry and all later ones are deleted.
delete from penstock.journal_entry
where task_id = $1 and position >= (
    select position from penstock.journal_entry where task_id = $1 and name = $2 and repetition = $3);

-- name: raise_journal_floor
-- $1 id. Reports of steps by claims up to now count no more: a late one would bring back a step that is to run again.
update penstock.task set journal = claim where id = $1;

-- name: delete_gone_journals
-- $1 behind this task, $2 how many tasks to look at. Entries of tasks whose record is gone, and what is noted of tasks that
-- were put off. Records are looked up by scalar
-- subqueries, for an EXISTS may be hashed, and that reads the whole history. Returns the last task looked at, null for
-- none, how many were, and how many entries were deleted.
with looked as materialized (
    (select distinct task_id from penstock.journal_entry where task_id > $1 order by task_id limit $2)
    union
    (select task_id from penstock.postponed where task_id > $1 order by task_id limit $2)
    order by task_id limit $2
), lost as materialized (
    select task_id from looked l
    where (select t.id from penstock.task t where t.id = l.task_id) is null
      and (select h.id from penstock.task_history h where h.id = l.task_id limit 1) is null
), gone as (
    delete from penstock.journal_entry where task_id = any(array(select task_id from lost)) returning 1
), forgotten as (
    delete from penstock.postponed where task_id = any(array(select task_id from lost)) returning 1
)
select max(task_id) as last, count(*) as looked, (select count(*) from gone) as deleted from looked;
