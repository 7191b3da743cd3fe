"""`penstock grants`: each process gets the rights that its statements need, and not one more."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.db.migrate import PARTITIONS, PRIVILEGES, RIGHTS, grants
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Refused

_SERVICES = Path(__file__).parents[2] / "services"
# Each process with what cli/run.py adds to it.
_BEGINNINGS = {
    "submitter": ["penstock.submitter"],
    "scheduler": ["penstock.scheduler.process"],
    "resulter": ["penstock.resulter"],
    "supervisor": [
        "penstock.supervisor.process",
        "penstock.compat.delayed_records",
        "penstock.compat.scheduler0.store",
    ],
    "api": ["penstock.api.process", "penstock.compat.clockwork.http", "penstock.compat.scheduler0.http.routes"],
    "kafka-source": ["penstock.compat.topics.process"],
}
_LETTERS = {privilege: letter for letter, privilege in PRIVILEGES.items()}
_PARTITION = "task_success_default"
ROLE = "probe"


@cache
def _imports_and_texts(module: str) -> tuple[list[str], set[str]] | None:
    path = _SERVICES.joinpath(*module.split(".")).with_suffix(".py")
    if not path.exists():
        return None
    imports: list[str] = []
    texts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imports += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return imports, texts


def statements_of(process: str) -> set[str]:
    """Names of the statements that stand in the modules which a process imports."""
    waiting, seen, found = list(_BEGINNINGS[process]), set[str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module not in seen and (read := _imports_and_texts(module)) is not None:
            waiting += read[0]
            found |= read[1] & SQL.keys()
        seen.add(module)
    return found


@pytest.fixture
async def owner(database_url: str, postgres: EmbeddedPostgres) -> AsyncIterator[Any]:
    """A connection of the owner of the schema, beside a role without any right."""
    connection = await asyncpg.connect(database_url, statement_cache_size=0)
    await connection.execute(f"create role {ROLE} login password 'probe'")
    yield connection
    await connection.execute(f"drop owned by {ROLE}; drop role {ROLE}")
    await connection.close()


async def may_run(owner: Any, name: str, revoked: str) -> bool:
    """Whether the role may run a statement without a privilege; nothing is changed by asking."""
    text = SQL[name].replace("{partition}", _PARTITION).replace("{parent}", "task_success")
    bare = re.sub(r"--[^\n]*", "", text)
    count = max(map(int, re.findall(r"\$(\d+)", bare)), default=0)
    given = f"({', '.join(['null'] * count)})" if count else ""
    run = text if bare.strip().startswith("lock") else f"prepare probed as {text}; explain execute probed {given}"
    transaction = owner.transaction()
    await transaction.start()
    try:
        await owner.execute(
            f"deallocate all; {revoked}; set local plan_cache_mode = force_generic_plan; set local role {ROLE}; {run}"
        )
    except asyncpg.InsufficientPrivilegeError:
        return False
    finally:
        await transaction.rollback()
    return True


async def needs_of(owner: Any, name: str, relations: Sequence[str]) -> dict[str, set[str]]:
    """The letters by table or sequence that the role, which has all rights, may not lose."""
    text = SQL[name].replace("{partition}", _PARTITION)
    return {
        relation: {
            letter
            for letter in "arwd"
            if not await may_run(owner, name, f"revoke {PRIVILEGES[letter]} on penstock.{relation} from {ROLE}")
        }
        for relation in relations
        if re.search(rf"\b{relation}\b", text) is not None
    }


async def test_the_rights_of_each_process_are_those_that_its_statements_need(owner: Any) -> None:
    for kind in ("tables", "sequences", "functions"):
        await owner.execute(f"grant all on all {kind} in schema penstock to {ROLE}")
    await owner.execute(f"grant usage on schema penstock to {ROLE}")
    rows = await owner.fetch(
        "select relname from pg_class where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p', 'S')"
        " and relname <> 'alembic_version' and (not relispartition or relname = $1)",
        _PARTITION,
    )
    relations = [row["relname"] for row in rows]
    guarded = await owner.fetch(
        "select proname from pg_proc where pronamespace = 'penstock'::regnamespace and prosecdef"
    )
    functions = {row["proname"] for row in guarded}
    statements = {process: statements_of(process) for process in _BEGINNINGS}
    needs = {name: await needs_of(owner, name, relations) for name in sorted(set().union(*statements.values()))}
    for process, names in statements.items():
        needed: dict[str, set[str]] = {}
        for name in names:
            for thing, letters in needs[name].items():
                needed[thing] = needed.get(thing, set()) | letters
            for sequence in re.findall(r"nextval\('penstock\.(\w+)", SQL[name]):
                needed[sequence] = needed.get(sequence, set()) | {"U"}
            for function in set(re.findall(r"penstock\.(\w+)\(", SQL[name])) & functions:
                needed[function] = {"X"}
        assert needed.pop(_PARTITION, set()) == set(PARTITIONS.get(process, "")), process
        declared = {thing: set(letters) for thing, letters in RIGHTS[process].items()}
        missing = {thing: letters - declared.get(thing, set()) for thing, letters in needed.items()}
        beyond = {thing: letters - needed.get(thing, set()) for thing, letters in declared.items()}
        shown = [
            " ".join(f"{thing}={''.join(sorted(letters))}" for thing, letters in sorted(found.items()) if letters)
            for found in (missing, beyond)
        ]
        assert shown == ["", ""], f"db/rights.txt, {process}: add the first, take the second away"


@pytest.mark.parametrize("process", RIGHTS)
async def test_a_role_has_the_rights_of_its_process_and_no_other(owner: Any, process: str) -> None:
    await owner.execute(f"grant all on all tables in schema penstock to {ROLE}")  # which it is to lose
    await owner.execute(";".join(grants(ROLE, [process])))
    await owner.execute("create table penstock.later (id int)")
    held = await owner.fetch(
        "select c.relname as name, a.privilege_type as privilege from pg_class c,"
        " aclexplode(c.relacl) a where c.relnamespace = 'penstock'::regnamespace and a.grantee = $1::regrole"
        " union all select p.proname, a.privilege_type from pg_proc p, aclexplode(p.proacl) a"
        " where p.pronamespace = 'penstock'::regnamespace and a.grantee = $1::regrole",
        ROLE,
    )
    rights: dict[str, set[str]] = {}
    for row in held:
        rights.setdefault(row["name"], set()).add(_LETTERS[row["privilege"].lower()])
    assert rights.pop("alembic_version") == {"r"}
    days = {name for name in rights if re.match("task_(success|critical_error|cancelled)", name)} | {"later"}
    for name in days:
        assert rights.pop(name, set()) == set(PARTITIONS.get(process, "")), name
    assert rights == {name: set(letters) for name, letters in RIGHTS[process].items()}
    assert not await owner.fetchval("select has_schema_privilege($1, 'penstock', 'create')", ROLE)


@pytest.mark.parametrize(
    ("process", "statement"),
    [
        ("scheduler", "select * from penstock.api_key"),
        ("scheduler", "insert into penstock.rejected default values"),
        ("scheduler", "update penstock.task_history set result = null"),
        ("resulter", "select * from penstock.audit"),
        ("resulter", "delete from penstock.task_history"),
        ("submitter", "select penstock.drop_partition('task_success_20200101')"),
        ("submitter", "select * from penstock.api_key"),
        ("supervisor", "select * from penstock.api_key"),
        ("supervisor", "select * from penstock.dashboard_session"),
        ("api", "delete from penstock.audit"),
        ("api", "insert into penstock.claim_key default values"),
        ("api", "select nextval('penstock.claim_seq')"),
        ("kafka-source", "delete from penstock.task"),
        *((process, "create table penstock.x ()") for process in RIGHTS),
    ],
)
async def test_a_role_is_refused_what_its_process_never_does(owner: Any, process: str, statement: str) -> None:
    await owner.execute(";".join(grants(ROLE, [process])))
    async with owner.transaction():
        await owner.execute(f"set local role {ROLE}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with owner.transaction():
                await owner.execute(statement)


def test_an_unknown_process_is_named_and_a_worker_has_no_role() -> None:
    with pytest.raises(Refused, match="unknown process 'shceduler'; did you mean scheduler"):
        grants(ROLE, ["shceduler"])
    with pytest.raises(Refused, match="no connection to Postgres"):
        grants(ROLE, ["worker"])


async def test_several_processes_share_a_role(owner: Any) -> None:
    await owner.execute(";".join(grants(ROLE, ["scheduler", "resulter"])))
    for sequence in ("claim_seq", "task_id_seq"):
        assert await owner.fetchval("select has_sequence_privilege($1, 'penstock.' || $2, 'usage')", ROLE, sequence)
