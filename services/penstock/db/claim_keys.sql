-- Keys of claim ids, which distinguish results from forged ones.

-- name: read_claim_keys
-- Newest first. Times are judged here, by the one clock that all share.
select secret, date_part('epoch', accepted_until - now()) as seconds_left
from penstock.claim_key where accepted_until is null or accepted_until > now() order by id desc;

-- name: change_claim_key
-- $1 the new secret, $2 seconds for which the keys before it are still accepted.
with gone as (
    delete from penstock.claim_key where accepted_until <= now()
), older as (
    update penstock.claim_key set accepted_until = least(accepted_until, now() + make_interval(secs => $2::float8))
    where accepted_until is null or accepted_until > now()
    returning id
), made as (
    insert into penstock.claim_key (secret) values ($1)
)
select count(*) from older;
