"""The name of the schema. SQL is written for the schema ``penstock``, and rewritten for another one (decisions/054).

A text that names roles is not rewritten, for they may be called penstock_app.
"""

import re
from functools import cache, lru_cache

DEFAULT = "penstock"
PREFIXED = ("enqueue", "enqueue_many", "note_trace", "settle", "work", "workflows", "output", "armed")
"""What stands behind ``penstock_``: functions in `public`, and channels."""


@lru_cache(2048)
def renamed(text: str, schema: str) -> str:
    """SQL, or the name of a function or channel, for a schema of that name. Doing so again changes nothing."""
    return text if schema == DEFAULT else _name(schema).sub(schema, text)


def is_ambiguous(schema: str) -> bool:
    """Whether a function or a channel is called so, or begins so."""
    return schema != DEFAULT and any(f"{DEFAULT}_{name}_".startswith(f"{schema}_") for name in PREFIXED)


@cache
def _name(schema: str) -> re.Pattern[str]:
    # As it qualifies a name, begins that of a function in `public` or of a channel, is a literal, or begins a lock's
    # name. Parameters of a session, such as penstock.notify, belong to the programs that set them and keep their names.
    # Alembic and the driver's LISTEN give texts that have the schema's name already, which may begin with penstock_.
    rest = schema.removeprefix(f"{DEFAULT}_") if schema.startswith(f"{DEFAULT}_") else ""
    done = rf"(?!{rest}(?![a-z0-9]))" if rest else ""
    return re.compile(
        r"\bpenstock(?=\.(?!(?:notify|max_attempts|payload_limit_bytes|result_limit_bytes)\b)[\w%'{]"
        rf"|_{done}[a-z']|'|, pg_temp)"
        r"|(?<=\bschema )penstock\b|(?<=')penstock(?= [a-z]+')"
    )
