"""scheduler0's records as its API writes them, and the statements about them that several callers run."""

import hmac
import secrets
from datetime import datetime

import msgspec

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.api_key import digest_of


class Credential(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A credential; ``api_secret`` is empty if only its digest is stored."""

    id: int = 0
    archived: bool = False
    api_key: str = ""
    api_secret: str = ""
    date_created: datetime


class Project(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    id: int = 0
    name: str = ""
    description: str = ""
    date_created: datetime


def is_secret(secret: str, digest: bytes) -> bool:
    return hmac.compare_digest(digest, digest_of(secret.encode("utf-8")))


async def create_credential(session: Session | Store, *, readable: bool) -> Credential:
    """Create a credential; returns it with its secret, which is stored in clear if ``readable``."""
    api_key, secret = secrets.token_hex(24), secrets.token_hex(32)
    digest = digest_of(secret.encode("ascii"))
    (row,) = await session.fetch("create_credential", api_key, digest, secret if readable else None)
    return Credential(**dict(row) | {"api_secret": secret})


async def find_credential(session: Session | Store, api_key: str, secret: str) -> int | None:
    """The id of the credential, if it is not archived and the secret is its own."""
    rows = await session.fetch("find_credential", api_key)
    return int(rows[0]["id"]) if rows and is_secret(secret, rows[0]["secret_hash"]) else None


async def archive_credential(session: Session | Store, credential_id: int, archived: bool = True) -> Credential | None:
    """Archive a credential, which is refused from now on, or restore it; None for an unknown id."""
    rows = await session.fetch("archive_credential", credential_id, archived)
    return Credential(**rows[0]) if rows else None
