"""The rights that each process needs in the schema, and the statements that give them to a role of its own.

A process needs those of the statements that its modules name: tests/integration/test_roles.py finds them and compares.
A worker needs none.
"""

import re
from collections.abc import Sequence

from penstock.protocol.errors import Refused
from penstock.protocol.schema import DEFAULT, renamed
from penstock.protocol.spelling import did_you_mean

# By the letters of Postgres's own lists of rights.
PRIVILEGES = {"r": "select", "a": "insert", "w": "update", "d": "delete", "U": "usage", "X": "execute"}
_RIGHTS = {
    "submitter": (
        "action=arwd audit=arw claim_key=r dispatch=r gate=arw inbound_receipt=ar job=arw "
        "journal_entry=arwd ordering_head=arwd payload_object=ar rejected=ar resulter=r route=arwd schedule=arwd "
        "schedule_clock=arwd schedule_import=arw schedule_import_part=a schedule_run=ar tally=ar task=arwd "
        "task_history=arwd task_output=ard tenant=arwd turn=arwd "
        "unique_key=arwd wait=arwd workflow=arw workflow_edge=ar workflow_event=arwd workflow_step=arw "
        "task_id_seq=rU turn_id_seq=U "
        "announced=arw postponed=arwd"
    ),
    "scheduler": (
        "action=rw claim_key=r dispatch=ard gate=arwd journal_entry=r ordering_head=rwd route=r tally=ar task=rwd "
        "task_history=ar tenant=r tenant_pace=arw turn=arwd wait=rw workflow_event=a claim_seq=U turn_id_seq=U "
        "announced=r postponed=arw"
    ),
    "resulter": (
        "action=arw announced=arw claim_key=r gate=arw inbound_receipt=ar journal_entry=arwd ordering_head=arwd "
        "payload_object=ar postponed=arw rejected=ar "
        "resulter=arwd route=r tally=a task=arwd task_history=ar task_output=ard tenant=r turn=arwd "
        "unique_key=arw wait=arw workflow=rw workflow_edge=ar workflow_event=arwd workflow_step=arw "
        "task_id_seq=U turn_id_seq=U"
    ),
    "supervisor": (
        "action=arwd armed=arwd audit=rwd claim_key=r default_move=r dispatch=arwd emptying=arw forgetting=arwd "
        "gate=arw inbound_receipt=arwd job=arwd journal_entry=arwd ordering_head=arwd payload_object=arwd "
        "rejected=arwd resulter=arwd route=arwd schedule=arwd schedule_clock=arwd schedule_import=arwd "
        "schedule_import_part=ard schedule_run=arwd scheduler0_credential=arw scheduler0_job=r scheduler0_request=rwd "
        "tally=ard task=arwd task_history=arwd task_output=ard tenant=arwd tenant_pace=rwd turn=arwd unique_key=arwd "
        "wait=arwd workflow=arwd workflow_edge=ard workflow_event=arwd workflow_step=arwd claim_seq=U task_id_seq=rU "
        "turn_id_seq=U "
        "begin_default_move=X detach_partition=X drop_partition=X end_default_move=X index_partition=X "
        "make_partition=X step_default_move=X summarize_history=X "
        "announced=arwd postponed=arwd"
    ),
    "api": (
        "action=arwd api_key=arw armed=arwd audit=arw claim_key=r dashboard_session=arwd dispatch=r gate=arw "
        "inbound_receipt=ar job=arw journal_entry=arwd ordering_head=arwd payload_object=ar rejected=arwd resulter=r "
        "route=arwd schedule=arwd "
        "schedule_clock=arwd schedule_import=arw schedule_import_part=a schedule_run=ar scheduler0_credential=arwd "
        "scheduler0_job=arwd scheduler0_project=arwd scheduler0_request=ar tally=ar task=arwd task_history=arwd "
        "task_output=ard tenant=arwd turn=arwd unique_key=arwd wait=arwd workflow=arw workflow_edge=ar "
        "workflow_event=arwd workflow_step=arw task_id_seq=rU turn_id_seq=U "
        "announced=arw postponed=arwd"
    ),
    "kafka-source": (
        "armed=arwd claim_key=r inbound_receipt=ar kafka_position=arw ordering_head=arw payload_object=a "
        "rejected=ar route=r tally=a task=arw task_history=r unique_key=arw task_id_seq=U"
    ),
}
RIGHTS = {process: dict(entry.split("=") for entry in text.split()) for process, text in _RIGHTS.items()}
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
    later = "alter default privileges in schema penstock"
    statements = [
        f"revoke all on all {kind} in schema penstock from {name}" for kind in ("tables", "sequences", "functions")
    ]
    statements += [f"{later} revoke all on {kind} from {name}" for kind in ("tables", "sequences", "functions")]
    statements += [f"grant usage on schema penstock to {name}", f"grant select on penstock.alembic_version to {name}"]
    for letter, privilege in PRIVILEGES.items():
        things = sorted(
            {thing for process in processes for thing, letters in RIGHTS[process].items() if letter in letters}
        )
        if things:
            listed = ", ".join(f"penstock.{thing}" for thing in things)
            statements.append(f"grant {privilege} on {_KINDS.get(letter, '')}{listed} to {name}")
    for letters in {PARTITIONS[process] for process in processes if process in PARTITIONS}:
        privileges = ", ".join(PRIVILEGES[letter] for letter in letters)
        statements += [
            f"{later} grant {privileges} on tables to {name}",  # the partitions of days to come
            "do $penstock$ declare part regclass; begin "
            "for part in select relid from pg_partition_tree('penstock.task_history') where level > 0 loop "
            f"execute format('grant {privileges} on %s to %s', part, {_literal(name)}); end loop; end $penstock$",
        ]
    return [renamed(statement, schema) for statement in statements]


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
