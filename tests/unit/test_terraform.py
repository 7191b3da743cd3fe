"""terraform/ against the settings and the SQS transport: the queues it makes are the ones that the processes expect."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hcl2
import pytest

from penstock.settings import PREFIX, Settings, load_settings
from penstock.transports import sqs

TERRAFORM = Path(__file__).parents[2] / "terraform"
FILES = sorted(TERRAFORM.rglob("*.tf"))
DAY = 86_400
ROLES = {"inbound", "outbound", "results"}
CONSUME = {
    "sqs:ReceiveMessage",
    "sqs:DeleteMessage",
    "sqs:ChangeMessageVisibility",
    "sqs:GetQueueUrl",
    "sqs:GetQueueAttributes",
}
PRODUCE = {"sqs:SendMessage", "sqs:GetQueueUrl", "sqs:GetQueueAttributes"}
INSPECT = {"sqs:GetQueueUrl", "sqs:GetQueueAttributes"}
DEAD_LETTERS = {f"{role}-dlq" for role in ROLES}


def plain(value: Any) -> Any:
    """The parser's tree without its marks: strings unquoted, so that one form serves keys and values."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str) and len(value) >= 2 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


class Module:
    """All .tf files of the module as one tree."""

    def __init__(self) -> None:
        self.resources: dict[str, dict[str, Any]] = {}
        self.data: dict[str, dict[str, Any]] = {}
        self.variables: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.locals: dict[str, Any] = {}
        self.terraform: dict[str, Any] = {}
        for path in TERRAFORM.glob("*.tf"):
            tree = plain(hcl2.loads(path.read_text("utf-8")))
            for block, where in (("resource", self.resources), ("data", self.data)):
                for item in tree.get(block, ()):
                    for kind, named in item.items():
                        where.setdefault(kind, {}).update(named)
            for block, flat in (("variable", self.variables), ("output", self.outputs)):
                for item in tree.get(block, ()):
                    flat.update(item)
            for item in tree.get("locals", ()):
                self.locals.update(item)
            for item in tree.get("terraform", ()):
                self.terraform.update(item)

    def default(self, variable: str) -> Any:
        return self.variables[variable]["default"]

    def resolve(self, value: Any, key: str) -> Any:
        """``value`` with defaults for variables and ``key`` for each.key, as far as that is all it refers to."""
        if not isinstance(value, str):
            return value
        if match := re.fullmatch(r"\$\{var\.(\w+)\}", value):
            return self.default(match[1])
        value = value.replace("${each.key}", key)
        return re.sub(r"\$\{var\.(\w+)\}", lambda match: str(self.default(match[1])), value)

    def roles(self, resource: dict[str, Any]) -> set[str]:
        """The keys a resource is repeated for, where those are the roles of queues."""
        assert resource["for_each"] == "${local.queues}", resource["for_each"]
        return set(re.findall(r'"([^"]+)"', self.locals["queues"]))


@pytest.fixture(scope="module")
def module() -> Module:
    return Module()


def default_of(setting: str) -> Any:
    return Settings.model_fields[setting].default


def test_queue_names_with_the_default_prefix_are_the_defaults_of_the_settings(module: Module) -> None:
    main = module.resources["aws_sqs_queue"]["main"]
    assert module.roles(main) == ROLES
    for role in ROLES:
        assert module.resolve(main["name"], role) == default_of(f"{role}_queue")


def test_every_queue_has_a_dead_letter_queue_named_as_the_transport_names_it(module: Module) -> None:
    dead = module.resources["aws_sqs_queue"]["dead_letter"]
    assert module.roles(dead) == ROLES
    for role in ROLES:
        assert module.resolve(dead["name"], role) == default_of(f"{role}_queue") + sqs.DEAD_LETTER_SUFFIX


@pytest.mark.parametrize("name", ["main", "dead_letter"])
def test_queues_take_messages_as_large_as_the_transport_packs(module: Module, name: str) -> None:
    assert module.resources["aws_sqs_queue"][name]["max_message_size"] == sqs.LIMITS.max_message_bytes == 1_048_576


@pytest.mark.parametrize("name", ["main", "dead_letter"])
def test_queues_are_polled_long(module: Module, name: str) -> None:
    wait = module.resources["aws_sqs_queue"][name]["receive_wait_time_seconds"]
    assert wait == default_of("receive_wait_seconds") == 20


def test_visibility_timeout_is_the_default_of_the_settings(module: Module) -> None:
    main = module.resources["aws_sqs_queue"]["main"]
    assert module.resolve(main["visibility_timeout_seconds"], "inbound") == default_of("visibility_timeout_seconds")


def test_visibility_timeout_is_validated_to_the_range_of_the_settings(module: Module) -> None:
    condition = module.variables["visibility_timeout_seconds"]["validation"][0]["condition"]
    low, high = (int(number) for number in re.findall(r"[<>]= (\d+)", condition))
    environ = {"minimum": low, "maximum": high}
    schema = Settings.model_json_schema()["properties"]["visibility_timeout_seconds"]
    assert {key: schema[key] for key in environ} == environ


@pytest.mark.parametrize("name", ["main", "dead_letter"])
def test_queues_are_encrypted_with_the_managed_key_or_an_own_one_never_both(module: Module, name: str) -> None:
    queue = module.resources["aws_sqs_queue"][name]
    assert queue["sqs_managed_sse_enabled"] == "${var.kms_key_arn == null ? true : null}"
    assert queue["kms_master_key_id"] == "${var.kms_key_arn}"
    assert module.default("kms_key_arn") in (None, "null", "${null}")


def test_dead_letters_outlive_the_queues_and_receipts_outlive_the_messages(module: Module) -> None:
    queues = module.resources["aws_sqs_queue"]
    kept = module.resolve(queues["main"]["message_retention_seconds"], "inbound")
    dead_kept = module.resolve(queues["dead_letter"]["message_retention_seconds"], "inbound")
    assert (kept, dead_kept) == (4 * DAY, 14 * DAY)
    assert kept < default_of("retention_receipts_seconds")
    guard = queues["dead_letter"]["lifecycle"][0]["precondition"][0]["condition"]
    assert guard == "${var.dead_letter_retention_seconds > var.message_retention_seconds}"


def test_every_queue_redrives_to_its_own_dead_letter_queue_after_a_number_of_receives(module: Module) -> None:
    redrive = module.resources["aws_sqs_queue_redrive_policy"]["main"]
    assert module.roles(redrive) == ROLES
    assert redrive["queue_url"] == "${aws_sqs_queue.main[each.key].url}"
    assert "deadLetterTargetArn = aws_sqs_queue.dead_letter[each.key].arn" in redrive["redrive_policy"]
    # A reference, not a template in quotes: AWS refuses "5".
    assert re.search(r"maxReceiveCount = var\.max_receive_count\b", redrive["redrive_policy"])
    assert module.variables["max_receive_count"]["type"] in ("number", "${number}")
    count = module.default("max_receive_count")
    assert type(count) is int
    assert count == sqs.MAX_RECEIVES


def test_a_dead_letter_queue_takes_letters_of_its_own_queue_only(module: Module) -> None:
    allow = module.resources["aws_sqs_queue_redrive_allow_policy"]["dead_letter"]
    assert module.roles(allow) == ROLES
    assert allow["queue_url"] == "${aws_sqs_queue.dead_letter[each.key].url}"
    assert 'redrivePermission = "byQueue"' in allow["redrive_allow_policy"]
    assert "sourceQueueArns = [aws_sqs_queue.main[each.key].arn]" in allow["redrive_allow_policy"]


def test_all_six_queues_refuse_what_is_not_tls(module: Module) -> None:
    policy = module.resources["aws_sqs_queue_policy"]["tls_only"]
    assert policy["for_each"] == "${local.all_queue_names}"
    names = module.locals["all_queue_names"]
    assert "[for name in local.queues : name]" in names
    assert '[for name in local.queues : "${name}-dlq"]' in names
    for part in (
        'Version = "2012-10-17"',
        'Effect = "Deny"',
        'Principal = "*"',
        'Action = "sqs:*"',
        "Resource = local.all_queues[each.key].arn",
        '"aws:SecureTransport" = "false"',
    ):
        assert part in policy["policy"], part


def test_policies_allow_each_process_what_it_needs_and_nothing_else(module: Module) -> None:
    actions = {verb: set(listed) for verb, listed in module.locals["queue_actions"].items()}
    allowed = {
        process: {(action, queue) for verb, queues in grants.items() for queue in queues for action in actions[verb]}
        for process, grants in module.locals["access"].items()
    }

    def on(queue: str, listed: set[str]) -> set[tuple[str, str]]:
        return {(action, queue) for action in listed}

    assert allowed == {
        "producer": on("inbound", PRODUCE),
        "submitter": on("inbound", CONSUME),
        "scheduler": on("outbound", PRODUCE),
        "worker": on("outbound", CONSUME) | on("results", PRODUCE),
        "resulter": on("results", CONSUME),
        "api": {pair for queue in DEAD_LETTERS for pair in on(queue, CONSUME)}
        | {pair for queue in ROLES for pair in on(queue, PRODUCE)},
        "supervisor": {pair for queue in ROLES | DEAD_LETTERS for pair in on(queue, INSPECT)},
    }


def test_an_own_key_may_be_used_as_far_as_receiving_and_sending_need_it(module: Module) -> None:
    keys = {verb: set(listed) for verb, listed in module.locals["key_actions"].items()}
    assert keys == {"Consume": {"kms:Decrypt"}, "Produce": {"kms:Decrypt", "kms:GenerateDataKey"}, "Inspect": set()}
    assert keys.keys() == module.locals["queue_actions"].keys()


def test_policy_documents_hold_the_tables_of_access_and_no_statement_of_their_own(module: Module) -> None:
    document = module.data["aws_iam_policy_document"]["process"]
    assert document["for_each"] == "${local.access}"
    assert set(document) == {"for_each", "dynamic"}, "a statement outside the tables would escape these tests"
    queue_statement, key_statement = (item["statement"] for item in document["dynamic"])
    content = queue_statement["content"][0]
    assert queue_statement["for_each"] == "${each.value}"
    assert content["actions"] == "${local.queue_actions[statement.key]}"
    assert content["resources"] == "${[for queue in statement.value : local.all_queues[queue].arn]}"
    content = key_statement["content"][0]
    assert "var.kms_key_arn != null" in key_statement["for_each"]
    assert content["actions"] == "${local.key_access[each.key]}"
    assert content["resources"] == ["${statement.value}"]


def test_no_policy_of_a_process_holds_a_wildcard() -> None:
    assert "*" not in (TERRAFORM / "iam.tf").read_text("utf-8")


def test_output_settings_are_settings_and_name_all_three_queues(module: Module) -> None:
    output = module.outputs["settings"]["value"]
    for variable in output:
        assert variable.startswith(PREFIX)
        assert variable.removeprefix(PREFIX).lower() in Settings.model_fields, f"{variable} is no setting"
    assert {"PENSTOCK_AWS_REGION", "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS"} <= output.keys()
    for role in ROLES:
        assert output[f"PENSTOCK_{role.upper()}_QUEUE"] == f'${{aws_sqs_queue.main["{role}"].url}}'


def test_settings_accept_the_output_as_their_environment(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in module.outputs["settings"]["value"]:
        name = variable.removeprefix(PREFIX)
        value = {"AWS_REGION": "eu-central-1", "VISIBILITY_TIMEOUT_SECONDS": "60"}.get(
            name, f"https://sqs.eu-central-1.amazonaws.com/123456789012/{name.lower()}"
        )
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert settings.inbound_queue.endswith("/inbound_queue")
    assert settings.visibility_timeout_seconds == 60


def test_provider_is_new_enough_for_messages_of_one_mebibyte(module: Module) -> None:
    providers = module.terraform["required_providers"]
    aws = (providers[0] if isinstance(providers, list) else providers)["aws"]
    assert aws["source"] == "hashicorp/aws"
    lowest = re.search(r">= (\d+)\.(\d+)\.(\d+)", aws["version"])
    assert lowest is not None
    assert tuple(int(part) for part in lowest.groups()) >= (6, 8, 0)


def test_every_variable_and_output_says_what_it_means_and_stands_in_the_readme(module: Module) -> None:
    readme = (TERRAFORM / "README.md").read_text("utf-8")
    for name, block in (module.variables | module.outputs).items():
        assert block["description"], name
        assert f"`{name}`" in readme, f"{name} is missing in terraform/README.md"
    for name, block in module.variables.items():
        assert "type" in block, name


ATTRIBUTE = re.compile(r'^(\s*)([\w-]+|"[^"]+")(\s+)= (\S.*)$')


def misaligned(text: str) -> list[int]:
    """Numbers of the lines whose equals sign is not where ``terraform fmt`` puts it.

    Consecutive attributes of one indent are aligned; a comment, an empty line, a block, or a value that goes on
    over several lines ends the run.
    """
    wrong: list[int] = []
    run: list[tuple[int, int, int]] = []  # line, width of the name, column of the equals sign

    def close() -> None:
        widest = max((width for _, width, _ in run), default=0)
        wrong.extend(line for line, _, column in run if column != widest + 1)
        run.clear()

    indent = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = ATTRIBUTE.match(line)
        opens = match is not None and match[4].endswith(("{", "[", "("))
        if match is None or match[1] != indent or opens:
            close()
        if match is not None:
            indent = match[1]
            run.append((number, len(match[2]), len(match[2]) + len(match[3])))
            if opens:
                close()
    close()
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TERRAFORM)))
def test_files_are_formatted_as_terraform_fmt_would(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "\t" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\n\n\n" not in text
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        assert line == line.rstrip(), f"{path.name}:{number} ends in a space"
        code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line).split("#", 1)[0]
        brackets = [1 if char in "{[(" else -1 for char in code if char in "{[()]}"]
        leading = len(re.match(r"\s*[\]})]*", code)[0].lstrip()) if code.strip() else 0  # type: ignore[index]
        if line.strip():
            level = depth - (1 if leading else 0)
            assert len(line) - len(line.lstrip()) == 2 * level, f"{path.name}:{number} is not indented by {2 * level}"
        # Brackets opened together on a line indent once: `Statement = [{`.
        total = sum(brackets)
        depth += (total > 0) - (total < 0)
    assert misaligned(text) == [], path.name


def test_misaligned_equals_signs_are_found() -> None:
    assert misaligned("a = 1\nlong = 2\n") == [1]
    assert misaligned("a    = 1\nlong = 2\n\nb = 3\n") == []
    assert misaligned("a = 1\n# why\nlong = 2\n") == []
    assert misaligned("a = {\n  long = 1\n  b = 2\n}\n") == [3]


def test_terraform_fmt_agrees_where_the_program_is_installed() -> None:
    program = shutil.which("terraform")
    assert FILES, "there is nothing to check"
    if program is None:
        return  # the tests above stand in for it
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TF_")} | {
        "CHECKPOINT_DISABLE": "1"
    }
    done = subprocess.run(
        [program, "fmt", "-check", "-diff", "-no-color", "-recursive", str(TERRAFORM)],
        capture_output=True, text=True, env=environ, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
