from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.runtime import metrics

REPOSITORY = Path(__file__).parents[3]
SOURCE = REPOSITORY / "services" / "penstock"
_ROW = re.compile(r"^\| `(penstock_[a-z_]+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)

declared = {name: metric for name, metric in vars(metrics).items() if isinstance(metric, Counter | Gauge | Histogram)}


def exported_name(metric: Counter | Gauge | Histogram) -> str:
    name = str(metric._name)
    return f"{name}_total" if isinstance(metric, Counter) else name


def documented_rows() -> list[tuple[str, ...]]:
    text = (REPOSITORY / "docs" / "metrics.md").read_text("utf-8")
    return [tuple(match.groups()) for match in _ROW.finditer(text)]


def expected_rows() -> list[tuple[str, ...]]:
    """The rows that the document must hold, made from the metrics themselves."""
    return [
        (
            exported_name(metric),
            type(metric).__name__.lower(),
            ", ".join(f"`{label}`" for label in metric._labelnames),
            metric._documentation,
        )
        for metric in declared.values()
    ]


def test_the_document_tables_every_metric_with_its_kind_labels_and_meaning() -> None:
    assert documented_rows() == expected_rows()


@pytest.mark.parametrize("name", declared)
def test_a_metric_is_named_for_the_project_and_its_unit(name: str) -> None:
    metric = declared[name]
    exported = exported_name(metric)
    assert exported.removesuffix("_total") == f"penstock_{name.lower()}"
    if isinstance(metric, Histogram) and name != "BATCH_SIZE":
        assert exported.endswith(("_seconds", "_bytes"))


def test_labels_come_from_small_sets() -> None:
    # Never an id, a key, a queue's URL or an error's text: each value of a label is a time series for ever.
    known = {"process", "outcome", "operation", "queue", "direction", "statement", "action", "state", "source",
             "reason", "kind", "method", "edge", "transport", "route", "duty"}  # fmt: skip
    assert {label for metric in declared.values() for label in metric._labelnames} <= known


def test_every_metric_is_exported() -> None:
    collected = {family.name for family in metrics.REGISTRY.collect()}
    assert {exported_name(metric).removesuffix("_total") for metric in declared.values()} <= collected


@given(values=st.lists(st.floats(0, 20) | st.sampled_from([0.1, 1.0, 10.0]), max_size=30))
def test_observing_many_values_at_once_is_observing_each(values: list[float]) -> None:
    registry = CollectorRegistry()
    one, many = (
        metrics.Histogram(name, "", buckets=(0.1, 1.0, 10.0), registry=registry) for name in ("one_s", "many_s")
    )
    for value in values:
        one.observe(value)
    many.observe_many(values)
    for suffix in ("count", "bucket", "sum"):
        for labels in [{"le": bound} for bound in ("0.1", "1.0", "10.0", "+Inf")] if suffix == "bucket" else [{}]:
            seen = registry.get_sample_value(f"many_s_{suffix}", labels)
            assert seen == pytest.approx(registry.get_sample_value(f"one_s_{suffix}", labels))


@pytest.mark.parametrize("name", declared)
def test_every_metric_is_set_somewhere(name: str) -> None:
    used = re.compile(rf"\bmetrics\.{name}\b")
    files = [path for path in SOURCE.rglob("*.py") if path.name != "metrics.py"]
    assert any(used.search(path.read_text("utf-8")) for path in files)


def test_further_actions_count_as_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_labelled_actions", {f"known-{n}" for n in range(499)})
    registry = CollectorRegistry()
    counter = metrics.Counter("made_total", "m", ["action", "state"], registry=registry)
    waits = metrics.Histogram("wait_seconds", "w", ["action"], registry=registry)
    for action in ("known-1", "the last that is named", *(f"made up {n}" for n in range(1000))):
        counter.labels(action, "SUCCESS").inc()
        waits.labels(action).observe_many([0.1])
    told = {sample.labels["action"] for metric in registry.collect() for sample in metric.samples}
    assert told == {"known-1", "the last that is named", "other"}
    assert registry.get_sample_value("made_total", {"action": "other", "state": "SUCCESS"}) == 1000
    assert registry.get_sample_value("wait_seconds_count", {"action": "other"}) == 1000
    other = metrics.Counter("calls_total", "c", ["operation"], registry=registry)
    other.labels("made up").inc()
    assert registry.get_sample_value("calls_total", {"operation": "made up"}) == 1
