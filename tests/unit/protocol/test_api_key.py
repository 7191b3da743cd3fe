from __future__ import annotations

import hashlib
from importlib.util import find_spec

import pytest

from penstock.compat.actions import MODULES
from penstock.protocol.api_key import (
    ALL_PERMISSIONS,
    PREFIX_CHARS,
    SECRET_PREFIX,
    Permission,
    check_name,
    digest_of,
    implied,
    may_enqueue,
    new_secret,
    parse_entries,
)
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import BUILT_IN_ACTIONS

DIGEST = hashlib.sha256(b"the-key-of-tests").hexdigest()


def problem_of(*entries: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_entries(entries)
    return str(caught.value)


def test_admin_implies_the_other_permissions_and_no_other_does() -> None:
    assert implied(["admin"]) == ALL_PERMISSIONS
    read = {Permission.READ, Permission.WORKER, Permission.SCALING}
    assert implied(["read"]) == read
    assert implied(["enqueue", "read"]) == {Permission.ENQUEUE, *read}
    for alone in ("enqueue", "worker", "scaling"):
        assert implied([alone]) == {Permission(alone)}
    with pytest.raises(ValueError):
        implied(["root"])


def test_plain_key_may_do_all_and_only_its_digest_is_kept() -> None:
    [key] = parse_entries(["the-key-of-tests"])
    assert (key.digest.hex(), key.permissions, key.id) == (DIGEST, ALL_PERMISSIONS, None)
    assert "the-key-of-tests" not in repr(key)
    assert DIGEST not in repr(key)


def test_entry_names_a_key_by_its_digest_with_its_permissions() -> None:
    [lower, upper] = parse_entries([f"ci:enqueue+read:{DIGEST}", f"ops:admin:{'AB' * 32}"])
    assert (lower.name, lower.digest, lower.permissions) == (
        "ci", digest_of(b"the-key-of-tests"), implied(["enqueue", "read"]),
    )  # fmt: skip
    assert (upper.name, upper.permissions) == ("ops", ALL_PERMISSIONS)


def test_an_entry_may_limit_a_key_to_actions() -> None:
    entries = [f"a:enqueue:{DIGEST}:acme:mail.*+report", f"b:enqueue:{'AB' * 32}::mail.send"]
    assert [(key.tenant, key.actions) for key in parse_entries(entries)] == [
        ("acme", ("mail.*", "report")), (None, ("mail.send",)),
    ]  # fmt: skip
    for wrong in ("", "a+", "m*il", "*.mail", "x" * 300, "a\x1fb"):
        assert "its actions" in problem_of(f"a:enqueue:{DIGEST}:acme:{wrong}")


@pytest.mark.parametrize(
    ("patterns", "tenant", "may", "may_not"),
    [
        (None, None, ["mail", "http.request"], []),
        (None, "acme", ["mail", "http"], sorted(BUILT_IN_ACTIONS)),
        (
            ["mail.*", "http.request"],
            "acme",
            ["mail.", "mail.send", "http.request"],
            ["mail", "email.send", "sql.execute"],
        ),
        (["*"], "acme", ["mail", *BUILT_IN_ACTIONS], []),
        (["mail"], None, ["mail"], ["mail.send", "Mail", ""]),
    ],
)
def test_a_key_enqueues_what_its_patterns_name(
    patterns: list[str] | None, tenant: str | None, may: list[str], may_not: list[str]
) -> None:
    assert [action for action in may + may_not if may_enqueue(action, patterns, tenant)] == may


def test_every_built_in_action_has_its_module() -> None:
    for action in BUILT_IN_ACTIONS:
        module = MODULES.get(action, "penstock.worker.deliveries." + action.partition(".")[0])
        assert find_spec(module) is not None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (f"hush:read:{DIGEST[:-1]}", "64 digits"),
        (f"hush:read:{DIGEST[:-1]}x", "64 digits"),
        (f"hush:root:{DIGEST}", "permissions must be of enqueue, read, admin"),
        (f"hush::{DIGEST}", "permissions must be of"),
        (f":read:{DIGEST}", "its name must have"),
        (f"{'hush' * 40}:read:{DIGEST}", "its name must have"),
        ("hush:read", "without colons"),
        (f"hush:read:{DIGEST}:", "its tenant must have 1 to 128 characters"),
        (f"hush:read:{DIGEST}:*", "its tenant must not be *"),
    ],
)
def test_wrong_entry_is_named_by_its_position_and_never_shown(entry: str, problem: str) -> None:
    text = problem_of("good-one", entry)
    assert "entry 2" in text
    assert problem in text
    assert "hush" not in text
    assert DIGEST[:20] not in text


def test_misspelt_digest_does_not_become_a_plain_key() -> None:
    """The digest is no secret: as a plain key, everybody who can read it could come in."""
    assert "entry 1" in problem_of(f"ci:read:{DIGEST[:-2]}")


def test_all_wrong_entries_are_told_at_once_and_repetitions_too() -> None:
    text = problem_of("a:b", "the-key-of-tests", f"same:read:{DIGEST}", "c:d")
    assert "entry 1" in text
    assert "entry 3 is the key of entry 2 again" in text
    assert "entry 4" in text


def test_new_secrets_are_random_and_can_be_told_by_their_prefix() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len({secret[:PREFIX_CHARS] for secret in secrets}) == 100
    for secret in secrets:
        assert secret.startswith(SECRET_PREFIX)
        assert len(secret) == len(SECRET_PREFIX) + 43  # 256 bits in base 64
        assert ":" not in secret
        assert "," not in secret


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "two\nlines", "bell\x07"])
def test_name_that_would_spoil_a_list_is_refused(name: str) -> None:
    with pytest.raises(InvalidParams):
        check_name(name)
    assert check_name(" ci of team 7 ") == "ci of team 7"
