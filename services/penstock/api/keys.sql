-- API keys, by their digests.

-- name: create_api_key
-- $1 name, $2 prefix, $3 SHA-256 of the secret, $4 permissions, $5 seconds until it expires, or null for never, $6 tenant or null,
-- $7 patterns of the actions that it may enqueue, or null.
-- No row: a key of that name is in use.
insert into penstock.api_key (name, prefix, hash, permissions, expires_at, tenant, actions)
values ($1, $2, $3, $4::text[], now() + make_interval(secs => $5::float8), $6, $7::text[])
on conflict do nothing
returning id, name, prefix, permissions, created_at, expires_at, revoked_at, last_used_at, tenant, actions;

-- name: list_api_keys
-- Newest first. $1 id that the page begins behind, or null; $2 limit; $3 whether with revoked ones.
select id, name, prefix, permissions, created_at, expires_at, revoked_at, last_used_at, tenant, actions from penstock.api_key
where ($1::bigint is null or id < $1) and ($3::boolean or revoked_at is null)
order by id desc limit $2;

-- name: revoke_api_key
-- $1 id or null, $2 name or null: the key that has it now, for names of revoked keys are free again. A second time changes nothing.
update penstock.api_key set revoked_at = coalesce(revoked_at, now())
where id = coalesce((select id from penstock.api_key where name = $2 and revoked_at is null), $1::bigint)
returning id, name, prefix, permissions, created_at, expires_at, revoked_at, last_used_at, tenant, actions;

-- name: read_active_keys
-- What each api keeps in memory. Expiry is judged here, by the one clock that all share.
select id, name, hash, permissions, tenant, actions from penstock.api_key
where revoked_at is null and (expires_at is null or expires_at > now());

-- name: note_key_use
-- $1 ids. Coarse, so that several api processes do not write the same minute over and over.
update penstock.api_key set last_used_at = now()
where id = any($1::bigint[]) and (last_used_at is null or last_used_at < now() - interval '30 seconds');
