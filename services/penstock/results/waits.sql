-- What tasks wait for, by token. A WAITING task that has a claim waits for an event; one without stands behind its
-- ordering key. Suspending a task and answering it both lock the row of its token, which makes the report of a
-- wait and an answer that comes at the same moment see each other, whichever is first; and then that of the task, always
-- in this order, so that they cannot deadlock. Three kinds of rows:
-- a task waits (deadline), an answer is kept (answer), it is over (neither; digest: of the answer, if there was one).

-- name: note_waits
-- $1 ids, $2 claims, $3 tokens (distinct), $4 seconds, $5 policies as JSON text, $6 whether each token stands
-- behind the tenant of its task. Tokens of claims that hold their task; one whose message was delivered twice has
-- several, here or from an earlier report, and any of them will do. All of a task are noted before it is suspended.
-- A token whose wait is over is free, as is one of an older claim of the same task. Returns (id, claim, action, state,
-- token, given, noted): the token as it is stored, and as it is in $3; not noted: an answer is kept for it, or a task
-- waits for it. The claims are made sure of by suspend_tasks.
with waiting as materialized (
    select t.id, t.claim, t.action, t.state::text as state,
           case when r.is_own and t.tenant is not null then t.tenant || e'\x1f' else '' end || r.token as token,
           r.token as given, r.seconds, r.policy
    from unnest($1::bigint[], $2::bigint[], $3::text[], $4::float8[], $5::text[], $6::bool[])
             r (id, claim, token, seconds, policy, is_own)
    join penstock.task t on t.id = any(array[r.id]) and t.claim = any(array[r.claim])
    where t.state::text in ('ACQUIRED', 'WAITING') and t.claimed_at is not null
), noted as (
    insert into penstock.wait as w (token, task_id, claim, deadline, policy)
    select token, id, claim, now() + make_interval(secs => seconds), policy::jsonb from waiting order by token
    on conflict (token) do update
    set task_id = excluded.task_id, claim = excluded.claim, deadline = excluded.deadline, policy = excluded.policy,
        digest = null, updated_at = now()
    where w.answer is null
      and (w.deadline is null or (w.task_id = excluded.task_id and w.claim < excluded.claim))
    returning token
)
select a.id, a.claim, a.action, a.state, a.token, a.given, n.token is not null as noted
from waiting a left join noted n on n.token = a.token;

-- name: suspend_tasks
-- $1 ids, $2 claims, $3 workers or null. ACQUIRED to WAITING; the claim stays, and with it the instant of the claim. Returns also those that
-- wait already: their claim holds.
with changed as (
    update penstock.task t
    set state = 'WAITING', heartbeat_at = null, route = null, gate = null, updated_at = now(),
        worker = coalesce(r.worker, t.worker)
    from (select * from unnest($1::bigint[], $2::bigint[], $3::text[]) r (id, claim, worker) order by id) r
    where t.id = any(array[r.id]) and t.claim = any(array[r.claim])
      and t.state::text in ('ACQUIRED', 'WAITING') and t.claimed_at is not null
    returning t.id, t.claim, t.workflow
), {notified}
select id, claim from changed;

-- name: resume_waits
-- $1 ids, $2 claims. WAITING to ACQUIRED, for no longer than this transaction, in which it is settled as any other.
update penstock.task t
set state = 'ACQUIRED', updated_at = now()
from {pairs}
where t.id = any(array[r.id]) and t.claim = any(array[r.claim]) and t.state::text = 'WAITING' and t.claimed_at is not null
returning t.id, t.claim;

-- name: read_tokens
-- $1 tokens. task_id, claim: which waits or waited for it, null for an answer that is kept; active: it waits now; answer:
-- kept until a task waits, as a member of a JSON-RPC response; digest: of the answer that was given or is kept.
select token, task_id, claim, deadline is not null as active, answer, digest, policy::text as policy
from penstock.wait where token = any($1::text[]);

-- name: find_claim_to_wait
-- $1 id, $2 claim. One row while that claim runs, or waits for the token of another of its runs.
select id from penstock.task
where id = $1 and claim = $2 and state::text in ('ACQUIRED', 'WAITING') and claimed_at is not null;

-- name: keep_answers
-- $1 tokens (distinct), $2 answers, $3 digests. Kept where the token is not known; where it is, its row is locked and
-- stays unchanged. Returns rows as read_tokens does, and whether each is fresh.
insert into penstock.wait as w (token, answer, digest)
select * from unnest($1::text[], $2::text[], $3::bytea[]) i (token, answer, digest) order by token
on conflict (token) do update set token = w.token
returning token, task_id, claim, deadline is not null as active, answer, digest, policy::text as policy,
    xmax = 0 as fresh;

-- name: keep_next_answers
-- $1 tokens, locked before, $2 answers, $3 digests. For the next wait of tasks that do not wait now.
update penstock.wait w
set task_id = null, claim = null, deadline = null, policy = null, answer = i.answer, digest = i.digest,
    updated_at = now()
from unnest($1::text[], $2::text[], $3::bytea[]) i (token, answer, digest)
where w.token = i.token and w.token = any($1::text[]);

-- name: note_answers
-- $1 tokens, locked before, $2 ids, $3 claims, $4 digests. These tasks have their answer.
update penstock.wait w
set task_id = i.id, claim = i.claim, deadline = null, answer = null, digest = i.digest, updated_at = now()
from unnest($1::text[], $2::bigint[], $3::bigint[], $4::bytea[]) i (token, id, claim, digest)
where w.token = i.token and w.token = any($1::text[]);

-- name: forget_tokens
-- $1 tokens.
delete from penstock.wait where token = any($1::text[]);

-- name: end_waits
-- $1 tokens, locked before. They are waited for no more.
update penstock.wait set deadline = null, updated_at = now() where token = any($1::text[]) and deadline is not null;

-- name: end_waits_of
-- $1 ids of tasks that wait no more. Relies on wait_task. A row that another transaction holds is ended by it.
update penstock.wait set deadline = null, updated_at = now()
where token in (select token from penstock.wait where task_id = any($1::bigint[]) and deadline is not null
                for update skip locked);

-- name: find_overdue_waits
-- $1 how many, $2 now or null. Locked; relies on wait_deadline.
select token, task_id, claim, policy::text as policy from penstock.wait
where deadline is not null and deadline <= coalesce($2::timestamptz, now())
order by deadline limit $1 for update skip locked;

-- name: delete_ended_waits
-- $1 seconds, $2 how many, $3 now or null. Answers that no task came to wait for, and waits that are over; relies on
-- wait_ended.
with gone as (
    delete from penstock.wait where token in (
        select token from penstock.wait
        where deadline is null and updated_at < coalesce($3::timestamptz, now()) - make_interval(secs => $1)
        order by updated_at limit $2 for update skip locked)
    returning 1
) select count(*) from gone;
