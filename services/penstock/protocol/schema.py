"""The name of the schema. SQL is written for the schema ``penstock``, and rewritten for another one.

``db/connecting.py`` does it for every statement, migration and listener on the way to the server, and
``tasks/transactional.py`` for statements on connections of programs.
"""

import re
from functools import lru_cache

DEFAULT = "penstock"

# As it qualifies a name, begins that of a function in `public` or of a channel, is a literal, or begins a lock's name.
# Parameters of a session, such as penstock.notify, belong to the programs that set them and keep their names.
_NAME = re.compile(
    r"\bpenstock(?=\.(?!(?:notify|max_attempts|payload_limit_bytes|result_limit_bytes)\b)[\w%'{]|_[a-z']|')"
    r"|penstock(?=, pg_temp)|(?<=\bschema )penstock\b|(?<=')penstock(?= [a-z]+')"
)


@lru_cache(2048)
def renamed(text: str, schema: str) -> str:
    """SQL, or the name of a function or channel, for a schema of that name."""
    return text if schema == DEFAULT else _NAME.sub(schema, text)
