"""The rights that each process needs in the schema, and the statements that give them to a role of its own.

A process needs those of the statements that its modules name: tests/integration/test_roles.py finds them and compares.
A worker needs none.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.errors import Refused
from penstock.protocol.schema import DEFAULT
from penstock.protocol.spelling import did_you_mean

# By the letters of Postgres's own lists of rights.
PRIVILEGES = {"r": "select", "a": "insert", "w": "update", "d": "delete", "U": "usage", "X": "execute"}
_HEAD, *_ROWS = (line.split() for line in Path(__file__).with_name("rights.txt").read_text("utf-8").splitlines()[1:])
RIGHTS = {
    process: {row[0]: row[place] for row in _ROWS if row[place] != "-"} for place, process in enumerate(_HEAD) if place
}
"""By process: the letters of each table, sequence and function. A partition goes by its root, or else by PARTITIONS."""
RIGHTS["clockwork-source"] = RIGHTS["kafka-source"]
PARTITIONS = {"supervisor": "rd"}  # which takes expired records from them one by one
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_.*)?")
_KINDS = {"U": "sequence ", "X": "function "}


def is_needed(process: str, name: str, privilege: str) -> bool:
    """Whether a process needs ``SELECT`` or another privilege on a table, sequence or function."""
    in_history = _PARTITION.fullmatch(name) is not None
    letters = PARTITIONS.get(process, "") if in_history else RIGHTS[process].get(name, "")
    return privilege.lower() in [PRIVILEGES[letter] for letter in letters]


def grants(role: str, processes: Sequence[str], *, schema: str = DEFAULT) -> list[str]:
    """Statements of the schema's owner that give a role what these processes need, and take from it what it had.

    Raises Refused for an unknown process.
    """
    if "worker" in processes:
        raise Refused("a worker needs no role: it has no connection to Postgres")
    for process in processes:
        if process not in RIGHTS:
            raise Refused(f"unknown process {process!r}{did_you_mean(process, RIGHTS)} (one of {', '.join(RIGHTS)})")
    name = '"' + role.replace('"', '""') + '"'
    as_text = name.replace("'", "''")
    later = f"alter default privileges in schema {schema}"
    statements = [
        f"revoke all on all {kind} in schema {schema} from {name}" for kind in ("tables", "sequences", "functions")
    ]
    statements += [f"{later} revoke all on {kind} from {name}" for kind in ("tables", "sequences", "functions")]
    statements += [f"grant usage on schema {schema} to {name}", f"grant select on {schema}.alembic_version to {name}"]
    for letter, privilege in PRIVILEGES.items():
        things = sorted(
            {thing for process in processes for thing, letters in RIGHTS[process].items() if letter in letters}
        )
        if things:
            listed = ", ".join(f"{schema}.{thing}" for thing in things)
            statements.append(f"grant {privilege} on {_KINDS.get(letter, '')}{listed} to {name}")
    for letters in {PARTITIONS[process] for process in processes if process in PARTITIONS}:
        privileges = ", ".join(PRIVILEGES[letter] for letter in letters)
        statements += [
            f"{later} grant {privileges} on tables to {name}",  # the partitions of days to come
            "do $penstock$ declare part regclass; begin "
            f"for part in select relid from pg_partition_tree('{schema}.task_history') where level > 0 loop "
            f"execute format('grant {privileges} on %s to %s', part, '{as_text}'); end loop; end $penstock$",
        ]
    return statements
