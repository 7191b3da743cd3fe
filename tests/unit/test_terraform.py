"""terraform/ against the settings, the SQS transport, what processes call; terraform's own checks if it is there."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2
import pytest

from penstock.brokers import sqs
from penstock.brokers.base import MAX_RECEIVES
from penstock.cli.run import PROCESSES
from penstock.payloads.bucket import OFFERED, folder_of
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import parse_bucket_url
from penstock.settings.values import PREFIX
from tests.terraform.make_schema import SCHEMA, used
from tests.terraform.provider import schema_provider
from tests.terraform.runs import CONFIGURATIONS, ROOT, copies, init, program, run

TERRAFORM = ROOT / "terraform"
CODE = ROOT / "services" / "penstock"
DAY = 86_400
ROLES = {"inbound", "outbound", "results"}
DEAD_LETTERS = {f"{role}{DEAD_LETTER_SUFFIX}" for role in ROLES}
ROUTES = {"<routes>"}  # the queues of routes, however many
QUEUE_METHODS = {"send", "receive", "delete", "extend", "release", "depth", "describe"}


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
        self.variables: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.locals: dict[str, Any] = {}
        self.terraform: dict[str, Any] = {}
        for path in TERRAFORM.glob("*.tf"):
            tree = plain(hcl2.loads(path.read_text("utf-8")))
            for item in tree.get("resource", ()):
                for kind, named in item.items():
                    self.resources.setdefault(kind, {}).update(named)
            for block, flat in (("variable", self.variables), ("output", self.outputs)):
                for item in tree.get(block, ()):
                    flat.update(item)
            for item in tree.get("locals", ()):
                self.locals.update(item)
            for item in tree.get("terraform", ()):
                self.terraform.update(item)

    def default(self, variable: str) -> Any:
        return self.variables[variable]["default"]

    def settings(self) -> dict[str, str]:
        """The environment that the module writes: the expression of each variable by its name."""
        return dict(re.findall(r'"?(PENSTOCK_\w+)"? (?:=>|=) ([^,{}]+(?:\{[^}]*\})?[^,{}]*)', self.locals["settings"]))


@pytest.fixture(scope="module")
def module() -> Module:
    return Module()


def default_of(setting: str) -> Any:
    return Settings.model_fields[setting].default


# Queues


def test_queue_names_with_the_default_prefix_are_the_defaults_of_the_settings(module: Module) -> None:
    assert set(re.findall(r'"(\w+)"', module.locals["roles"])) == ROLES
    assert 'for role in local.roles : role => {name = "${var.name_prefix}-${role}"' in module.locals["queues"]
    assert module.resources["aws_sqs_queue"]["main"]["name"] == "${each.value.name}"
    for role in ROLES:
        assert f"{module.default('name_prefix')}-{role}" == default_of(f"{role}_queue")


def test_every_queue_has_a_dead_letter_queue_named_as_the_transport_names_it(module: Module) -> None:
    queues = module.resources["aws_sqs_queue"]
    assert queues["main"]["for_each"] == queues["dead_letter"]["for_each"] == "${local.queues}"
    assert queues["dead_letter"]["name"] == "${each.value.name}" + DEAD_LETTER_SUFFIX


@pytest.mark.parametrize("name", ["main", "dead_letter"])
def test_queues_take_what_the_transport_packs_and_are_polled_long(module: Module, name: str) -> None:
    queue = module.resources["aws_sqs_queue"][name]
    assert queue["max_message_size"] == sqs.LIMITS.max_message_bytes == 1_048_576
    assert queue["receive_wait_time_seconds"] == default_of("receive_wait_seconds") == 20


def test_visibility_timeout_has_default_and_range_of_the_settings(module: Module) -> None:
    variable = module.variables["visibility_timeout_seconds"]
    assert variable["default"] == default_of("visibility_timeout_seconds")
    low, high = (int(number) for number in re.findall(r"[<>]= (\d+)", variable["validation"][0]["condition"]))
    schema = Settings.model_json_schema()["properties"]["visibility_timeout_seconds"]
    assert (low, high) == (schema["minimum"], schema["maximum"])
    assert f"visibility_timeout_seconds, 60) >= {low}" in str(module.variables["routes"]["validation"])


def test_dead_letters_outlive_the_queues_and_receipts_outlive_the_messages(module: Module) -> None:
    kept, dead_kept = module.default("message_retention_seconds"), module.default("dead_letter_retention_seconds")
    assert (kept, dead_kept) == (4 * DAY, 14 * DAY)
    assert kept < default_of("retention_receipts_seconds")
    guard = module.resources["aws_sqs_queue"]["dead_letter"]["lifecycle"][0]["precondition"][0]["condition"]
    assert guard == "${each.value.dead_letter_retention_seconds > each.value.message_retention_seconds}"


def test_every_queue_redrives_to_its_own_dead_letter_queue_which_takes_no_others(module: Module) -> None:
    redrive = module.resources["aws_sqs_queue_redrive_policy"]["main"]["redrive_policy"]
    assert "deadLetterTargetArn = aws_sqs_queue.dead_letter[each.key].arn" in redrive
    # A reference, not a template in quotes: AWS refuses "5".
    assert re.search(r"maxReceiveCount = each\.value\.max_receive_count\b", redrive)
    assert module.default("max_receive_count") == MAX_RECEIVES
    allow = module.resources["aws_sqs_queue_redrive_allow_policy"]["dead_letter"]["redrive_allow_policy"]
    assert 'redrivePermission = "byQueue"' in allow
    assert "sourceQueueArns = [aws_sqs_queue.main[each.key].arn]" in allow


# Policies


def actions_of(methods: set[str]) -> set[str]:
    """The IAM actions of the calls that methods of SqsQueue come down to."""
    tree = ast.parse((CODE / "brokers" / "sqs.py").read_text("utf-8"))
    (queue,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SqsQueue"]
    bodies = {node.name: node for node in queue.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found: set[str] = set()
    seen: set[str] = set()
    left = set(methods)
    while left:
        name = left.pop()
        seen.add(name)
        for node in ast.walk(bodies[name]):
            if isinstance(node, ast.Attribute) and node.attr in bodies.keys() - seen:
                left.add(node.attr)
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                operation = str(node.args[0].value)
                if re.fullmatch(r"(send|receive|delete|change|get)_\w+", operation):
                    found.add(action_of("sqs", operation))
    return found


def action_of(service: str, operation: str) -> str:
    """``send_message_batch`` as the action that IAM knows it by."""
    words = operation.removesuffix("_batch").split("_")
    return f"{service}:" + "".join(word.capitalize() for word in words)


def test_actions_are_read_from_the_transport() -> None:
    assert actions_of({"send"}) == {"sqs:SendMessage", "sqs:GetQueueUrl"}
    assert actions_of({"depth"}) == {"sqs:GetQueueAttributes", "sqs:GetQueueUrl"}
    assert actions_of({"release"}) == actions_of({"extend"}) == {"sqs:ChangeMessageVisibility", "sqs:GetQueueUrl"}


# Who calls what on which queue: by file, the expression that methods are called on, whose process it is, and the queues
# that it may stand for. A call that is not here fails the test below, as does a right that no call needs.
Place = tuple[str, str]
CALLERS: dict[Place, list[tuple[str, set[str]]]] = {
    ("client/inbound.py", "self._queue"): [("producer", {"inbound"})],
    ("tasks/consumer.py", "self._queue"): [("submitter", {"inbound"}), ("resulter", {"results"})],
    ("tasks/consumer.py", "self._receiver"): [("submitter", {"inbound"}), ("resulter", {"results"})],
    ("brokers/receiving.py", "self._queue"): [
        ("submitter", {"inbound"}),
        ("resulter", {"results"}),
        ("worker", {"outbound"}),
    ],
    ("submitter.py", "self._queue"): [("submitter", {"inbound"})],
    ("scheduler/process.py", "self._outbound"): [("scheduler", {"outbound"})],
    ("scheduler/sending.py", "queue"): [("scheduler", {"outbound"} | ROUTES)],
    ("worker/process.py", "self.outbound"): [("worker", {"outbound"})],
    ("worker/process.py", "self._receiver"): [("worker", {"outbound"})],
    ("worker/process.py", "self.results"): [("worker", {"results"})],
    ("worker/leases.py", "self._queue"): [("worker", {"outbound"})],
    ("worker/leases.py", "queue"): [("worker", {"outbound"})],
    ("worker/lease_thread.py", "outbound"): [("worker", {"outbound"})],
    ("worker/result_sender.py", "self._queue"): [("worker", {"results"})],
    ("supervisor/gauges.py", "queue"): [("supervisor", ROLES | DEAD_LETTERS | ROUTES)],
    ("results/watermark.py", "results"): [("supervisor", {"results"})],
    ("supervisor/repair.py", "queue"): [("supervisor", {"outbound"} | ROUTES)],
    ("cli/doctor/checks.py", "queue"): [("supervisor", ROLES | DEAD_LETTERS)],
    ("cli/doctor/checks.py", "transport.queue(name, label=name)"): [("supervisor", ROLES | DEAD_LETTERS)],
    ("api/dispatch.py", "queue"): [("api", ROLES)],
    ("api/dead_letters.py", "_queue(context, name)"): [("dlq_operator", DEAD_LETTERS)],
    ("api/dead_letters.py", "queue"): [("dlq_operator", ROLES)],
    ("api/dead_letters.py", "self._queue"): [("dlq_operator", DEAD_LETTERS)],
    ("api/dead_letters.py", "dead"): [("dlq_operator", DEAD_LETTERS)],
}
# Neither has rights of its own on AWS.
ELSEWHERE = (
    "brokers/rabbitmq/",
    "brokers/kafka/",
    "brokers/base.py",
    "brokers/chaos.py",
    "brokers/sqs.py",
    "brokers/receiving.py",
    "local/",
)


def calls() -> Iterator[tuple[Place, str]]:
    """Every call of a queue's method in the code that a process runs: the place, and the method."""
    for path in sorted(CODE.rglob("*.py")):
        name = path.relative_to(CODE).as_posix()
        text = path.read_text("utf-8")
        if name.startswith(ELSEWHERE) or not re.search(r"import[^\n]*\bQueue\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
                function = node.value.func
                # The method itself, or one that is given to a function of the same file, which calls it.
                for called in (function, *node.value.args):
                    if isinstance(called, ast.Attribute) and called.attr in QUEUE_METHODS:
                        yield (name, ast.unparse(called.value)), called.attr


NOT_A_QUEUE = {"self", "session", "claim", "self._leases", "self._notifier", "held"}  # with methods of these names too


def called() -> dict[str, set[tuple[str, str]]]:
    """What each process does on AWS: pairs of an action and a queue."""
    found: dict[str, set[tuple[str, str]]] = {}
    for place, method in calls():
        if place[1] in NOT_A_QUEUE:
            continue
        assert place in CALLERS, f"{place[0]} calls {place[1]}.{method}(): whose process is that, and on which queue?"
        for process, queues in CALLERS[place]:
            found.setdefault(process, set()).update((a, queue) for a in actions_of({method}) for queue in queues)
    return found


def queues_in(value: Any) -> set[str]:
    """The queues of a list, which may be an expression with the routes in it."""
    if isinstance(value, list):
        return set(value)
    return set(re.findall(r'"([\w-]+)"', value)) | (ROUTES if "keys(var.routes)" in value else set())


def test_policies_allow_each_process_what_it_calls_and_nothing_else(module: Module) -> None:
    actions = module.locals["queue_actions"]
    allowed = {
        process: {
            (action, queue)
            for verb, queues in grants.items()
            for queue in queues_in(queues)
            for action in actions[verb]
        }
        for process, grants in module.locals["access"].items()
    }
    wanted = called()
    for process in wanted.keys() | allowed.keys():
        assert allowed[process] == wanted[process], process
    assert {*PROCESSES, "worker"} <= allowed.keys()


def test_workers_of_a_route_may_what_other_workers_may_on_its_queue(module: Module) -> None:
    worker = module.locals["access"]["worker"]
    route = dict(re.findall(r"(\w+) = \[([^\]]+)\]", module.locals["route_workers"]))
    assert route.keys() == worker.keys()
    assert {verb: queues_in(queue) or {"outbound"} for verb, queue in route.items()} == {
        verb: set(queues) for verb, queues in worker.items()
    }


def test_what_sqs_send_calls_is_allowed_to_workers(module: Module) -> None:
    text = (CODE / "worker" / "deliveries" / "sqs.py").read_text("utf-8")
    operations = {"get_queue_url", *re.findall(r'call_batch\(\s*"(\w+)"', text)}
    assert {action_of("sqs", operation) for operation in operations} == set(module.locals["queue_actions"]["Send"])
    assert 'process == "worker" ? var.sqs_send_queue_arns : []' in module.locals["grants"]
    assert 'Action = local.queue_actions["Send"], Resource = arns' in module.locals["documents"]


def test_an_own_key_may_be_used_as_far_as_receiving_and_sending_need_it(module: Module) -> None:
    keys = {verb: set(listed) for verb, listed in module.locals["key_actions"].items()}
    assert keys == {"Consume": {"kms:Decrypt"}, "Send": {"kms:Decrypt", "kms:GenerateDataKey"}, "Inspect": set()}
    assert keys.keys() == module.locals["queue_actions"].keys()


def test_no_policy_of_a_process_allows_actions_by_a_wildcard(module: Module) -> None:
    listed = [*module.locals["queue_actions"].values(), *module.locals["payload_actions"].values()]
    listed += [*module.locals["key_actions"].values(), *module.locals["payload_key_actions"].values()]
    assert all(re.fullmatch(r"(sqs|s3|kms):[A-Za-z]+", action) for actions in listed for action in actions)
    assert set(re.findall(r'"[^"]*\*"', (TERRAFORM / "iam.tf").read_text("utf-8"))) == {
        '"].arn}/${prefix}*"',
        '"${prefix}*"',
    }


def test_the_bucket_is_used_by_the_calls_that_are_allowed(module: Module) -> None:
    bucket = pytest.importorskip("penstock.payloads.bucket")
    operations = set(re.findall(r'_call\(\s*"(\w+)"', Path(bucket.__file__).read_text("utf-8")))
    names = {"s3:DeleteObjects": "s3:DeleteObject", "s3:ListObjectsV2": "s3:ListBucket"}  # actions are named otherwise
    wanted = {names.get(action, action) for action in (action_of("s3", operation) for operation in operations)}
    assert wanted == {action for actions in module.locals["payload_actions"].values() for action in actions}
    access = module.locals["payload_access"]
    assert access.keys() == module.locals["access"].keys()
    for process, verbs in access.items():
        assert ("Read" in verbs) <= ("List" in verbs), process
        assert ("Fetch" in verbs) <= ("Look" in verbs), f"{process}: S3 would call a lost object forbidden"


def test_who_stores_an_object_may_and_workers_reach_those_of_their_own_queue_alone(module: Module) -> None:
    prefixes = module.locals["payload_prefixes"]
    assert prefixes["Offer"] == [OFFERED]
    assert all(folder_of("penstock-video").startswith(prefix) for prefix in prefixes["Write"])
    assert not any(OFFERED.startswith(prefix) for prefix in prefixes["Write"])
    text = module.locals["worker_payload_prefixes"]
    assert 'for queue in concat(["outbound"], keys(var.routes)) : queue =>' in text
    folders = re.findall(r'(\w+) = (?:concat\()?\["([^"]+)"\]', text)
    assert [verb for verb, _ in folders] == ["Keep", "Fetch"]
    for _, folder in folders:
        assert folder.replace("${local.queues[queue].name}", "penstock-video") == folder_of("penstock-video")


# Outputs, variables, files


def test_output_settings_are_settings_and_name_all_three_queues(module: Module) -> None:
    assert module.outputs["settings"]["value"] == "${local.settings}"
    settings = module.settings()
    for variable in settings.keys() - {"PENSTOCK_PAYLOAD_BUCKET"}:
        assert variable.removeprefix(PREFIX).lower() in Settings.model_fields, f"{variable} is no setting"
    assert {"PENSTOCK_AWS_REGION", "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS", "PENSTOCK_PAYLOAD_BUCKET"} <= settings.keys()
    for role in ROLES:
        assert settings[f"PENSTOCK_{role.upper()}_QUEUE"] == f'aws_sqs_queue.main["{role}"].url'


def test_settings_accept_the_output_as_their_environment(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"AWS_REGION": "eu-central-1", "VISIBILITY_TIMEOUT_SECONDS": "60"}
    for variable in module.settings().keys() - {"PENSTOCK_PAYLOAD_BUCKET"}:
        name = variable.removeprefix(PREFIX)
        monkeypatch.setenv(
            variable, values.get(name, f"https://sqs.eu-central-1.amazonaws.com/123456789012/{name.lower()}")
        )
    settings = load_settings()
    assert settings.inbound_queue.endswith("/inbound_queue")
    assert settings.visibility_timeout_seconds == 60


def test_the_bucket_is_told_in_the_form_that_its_setting_takes(module: Module) -> None:
    told = module.settings()["PENSTOCK_PAYLOAD_BUCKET"].strip('"').replace("${bucket.bucket}", "penstock-payloads-1")
    assert parse_bucket_url(told) == ("penstock-payloads-1", "")


def test_provider_is_new_enough_for_messages_of_one_mebibyte(module: Module) -> None:
    providers = module.terraform["required_providers"]
    aws = (providers[0] if isinstance(providers, list) else providers)["aws"]
    assert aws["source"] == "hashicorp/aws"
    lowest = re.search(r">= (\d+)\.(\d+)\.(\d+)", aws["version"])
    assert lowest is not None
    assert tuple(int(part) for part in lowest.groups()) >= (6, 8, 0)


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of a table's rows by the name in the first."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("` "): row[1:] for row in rows}


def test_the_tables_of_the_readme_are_the_variables_and_outputs(module: Module) -> None:
    page = (TERRAFORM / "README.md").read_text("utf-8")
    variables = rows_of(page, "Variables")
    assert list(variables) == list(module.variables)
    for name, (default, meaning) in variables.items():
        block = module.variables[name]
        value = block["default"]
        empty = value in (None, "null", "${null}", [], {})
        assert re.match(r"none" if empty else rf"`?{re.escape(str(value)).lower()}\b", default.lower()), name
        assert meaning.strip()
        assert block["description"]
        assert "type" in block
    outputs = rows_of(page, "Outputs")
    assert list(outputs) == list(module.outputs)
    assert all(block["description"] for block in module.outputs.values())


@pytest.mark.parametrize("path", ["terraform/README.md", "docs/tutorial.md"])
def test_examples_of_the_module_give_variables_that_it_has(module: Module, path: str) -> None:
    blocks = re.findall(r"```hcl\n(.*?)```", (ROOT / path).read_text("utf-8"), re.S)
    assert blocks
    for block in blocks:
        for item in plain(hcl2.loads(block)).get("module", ()):
            for given in item.values():
                assert given.keys() - {"source"} <= module.variables.keys()


def test_every_variable_with_a_range_or_a_form_is_validated(module: Module) -> None:
    free = {"tags", "create_payload_bucket", "create_dashboard"}
    assert {name for name, block in module.variables.items() if "validation" not in block} == free


# Terraform itself, where it is installed: `make terraform` does the same and more


needs_terraform = pytest.mark.skipif(program() is None, reason="terraform is not installed; make terraform says more")


@needs_terraform
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_files_are_formatted(name: str) -> None:
    done = run(ROOT / name, "fmt", "-check", "-diff", "-recursive", env={})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_terraform
def test_configurations_are_valid_and_pass_their_tests() -> None:
    with copies() as folder, schema_provider() as env:
        for name in CONFIGURATIONS:
            steps = [init(folder / name, env), run(folder / name, "validate", env=env)]
            if (folder / name / "tests").is_dir():
                steps.append(run(folder / name, "test", env=env))
                assert "0 failed" in steps[-1].stdout
            for done in steps:
                assert done.returncode == 0, f"{name}: {done.args}\n{done.stdout}{done.stderr}"


@needs_terraform
def test_an_argument_that_aws_does_not_know_is_found() -> None:
    with copies() as folder, schema_provider() as env:
        path = folder / "terraform" / "main.tf"
        path.write_text(path.read_text("utf-8").replace("max_message_size ", "max_message_sizes "), "utf-8")
        init(folder / "terraform", env)
        done = run(folder / "terraform", "validate", env=env)
        assert done.returncode != 0
        assert "max_message_sizes" in done.stdout + done.stderr


def test_the_schema_has_every_kind_that_a_configuration_uses() -> None:
    known = json.loads(SCHEMA.read_text("utf-8"))
    assert known["resources"].keys() == used()["resource"]
    assert known["data"].keys() == used()["data"]
