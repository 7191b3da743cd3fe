-- The watermark of the results queue: how far behind its results are recorded, as resulters note it.

-- name: note_resulter
-- $1 its name, $2 when the oldest result was sent that counts for its lag, as epoch seconds, null for none, $3 whether the
-- queue says when results were sent, $4 whether it has read and recorded without interruption since the note before. A
-- process that was stopped noted nothing meanwhile, and is interrupted too. By one clock for all, the database's.
insert into penstock.resulter as r (name, lag)
values ($1, case when $3 then greatest(0, coalesce(extract(epoch from now())::float8 - $2::float8, 0)) end)
on conflict (name) do update set lag = excluded.lag, noted_at = now(),
    since = case when $4 and r.noted_at > now() - interval '10 seconds' then r.since else now() end;

-- name: forget_resulter
-- $1 its name. With it go those that noted nothing for a day.
delete from penstock.resulter where name = $1 or noted_at < now() - interval '1 day';

-- name: read_watermark
-- $1 seconds for which a dead resulter may keep its messages from others. known: any resulter has noted within a day.
-- established: one has read without interruption for that long, so what others held is back in the queue, and counts for
-- its lag. lag: the largest of those that live, which grows while one notes nothing; a dead one counts no longer than that
-- and half a minute. has_times: the queue shows each of them when results were sent.
select count(*) > 0 as known,
       coalesce(bool_or(now() - since > make_interval(secs => $1)) filter (where lives), false) as established,
       coalesce(max(coalesce(lag, 0) + extract(epoch from now() - noted_at)::float8) filter (where lives), 0) as lag,
       coalesce(bool_and(lag is not null) filter (where lives), true) as has_times
from (select lag, since, noted_at, noted_at > now() - make_interval(secs => $1 + 30) as lives from penstock.resulter
      where noted_at > now() - interval '1 day') r;
