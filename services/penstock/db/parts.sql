-- Parts of statements in several files.

-- part: gate_name
-- Of a task t: where it waits when its action or its tenant is limited, one gate for each limit key. Indexes hold the
-- name, one of them beside the action, and an entry of an index has 2704 bytes; so a long limit key stands as its
-- digest, behind a character that no key may hold.
t.action || coalesce(E'\x1e' || t.tenant, '') || coalesce(E'\x1f' || case
    when octet_length(t.limit_key) <= 200 then t.limit_key
    else E'\x1e' || encode(sha256(convert_to(t.limit_key, 'UTF8')), 'hex') end, '')

-- part: is_free
-- Of an action a: whether nothing limits it; some of its limit keys may be held.
not a.paused and num_nonnulls(a.max_in_flight, a.rate, a.key_max_in_flight, a.key_rate) = 0
and coalesce(a.held_until <= now(), true)

-- part: tenant_is_limited
-- Of a task t: whether its tenant has a limit or is paused, by a rule of its own or by the default.
t.tenant is not null
  and (t.tenant in (select r.name from penstock.tenant r
                    where r.paused or r.max_in_flight is not null or r.rate is not null)
       or exists (select from penstock.tenant r
                  where r.name = '*' and (r.max_in_flight is not null or r.rate is not null))
          and t.tenant not in (select r.name from penstock.tenant r where r.own))

-- part: tenant_rules
-- Of a tenant o, or of all that have no limits of their own (d).
coalesce(o.paused, false) as paused,
case when o.own then o.max_in_flight else d.max_in_flight end as max_in_flight,
case when o.own then o.rate else d.rate end as rate,
case when o.own then o.burst else d.burst end as burst

-- part: journal_left
-- Of a task in `gone` (g) that starts again: null without a journal. Finished steps need not run again, those that failed
-- may; minus its claim where there are such, for a report that comes again would bring them back. See journal.sql.
(select case when bool_or(j.failed) then -g.claim else 0 end from penstock.journal_entry j where j.task_id = g.id
 having count(*) > 0)

-- part: failed_forgotten
failed_forgotten as (
    delete from penstock.journal_entry where task_id = any(array(select id from gone)) and failed
), snoozes_forgotten as (
    delete from penstock.postponed where task_id = any(array(select id from gone))
)

-- part: pairs
-- $1 ids, $2 claims.
(select * from unnest($1::bigint[], $2::bigint[]) r (id, claim) order by id) r

-- part: held
-- Of a task t: the claim of a pair r holds it. For the form see settle.sql.
t.id = any(array[r.id]) and t.claim = any(array[r.claim]) and t.state::text = 'ACQUIRED'

-- part: asked
-- $1 ids. A task t of each is found by t.id = any(array[u.id]); see settle.sql.
(select distinct unnest($1::bigint[]) as id order by id) u

-- part: notified
-- Of the tasks in `changed`, which wait to run again: workflows are notified, by an event of no task. One that fails by
-- now cancels them.
notified as (
    insert into penstock.workflow_event (workflow_id, task_id, claim, state)
    select distinct workflow, 0, 0, 'ERROR'::penstock.task_state from changed where workflow is not null
)

-- part: due_again
-- When a task t that is given back is due: a step of a workflow only when that has had the time to take note of it.
case when t.workflow is null then t.run_at else greatest(t.run_at, now() + interval '2 seconds') end

-- part: cancelled_by
-- When a step t of a workflow that is failing may run again at the earliest, for it is cancelled by then; null for other tasks,
-- and for compensations, which run once all steps have ended.
(select now() + interval '2 seconds' from penstock.workflow w
 where w.id = t.workflow and w.state = 'FAILING' and not w.compensated)

-- part: renoted
-- Of the tasks in `changed`: what is noted of a return by a worker without their action. It ends where a task has `moved` to
-- another time; else it stays, as of the task's `updated_at`, by which a later change is seen.
renoted as (
    update penstock.postponed p
    set returned_at = now(), unknown_since = case when not c.moved then p.unknown_since end
    from changed c where p.task_id = any(array[c.id])
)
