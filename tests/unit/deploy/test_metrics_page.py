"""docs/metrics.md lists every metric that a service registers, and no other."""

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from tests.support.deploy.metric_tables import MetricRow, sections

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTIONS = sections()


def documented(title: str) -> list[str]:
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [line for line in body.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_has_a_row_for_each_metric_and_no_other(title):
    assert documented(title) == [row.markdown() for row in SECTIONS[title]]


def test_every_registered_metric_is_in_a_section():
    named = {row.name.removesuffix("_total") for rows in SECTIONS.values() for row in rows}
    registered = {family.name for family in REGISTRY.collect() if family.name.startswith("trivet_")}
    assert registered - named == set()


@pytest.mark.parametrize("row", [row for rows in SECTIONS.values() for row in rows], ids=lambda row: row.name)
def test_names_follow_prometheus_conventions(row: MetricRow):
    assert re.fullmatch(r"trivet_[a-z0-9_]+", row.name)
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert not re.search(r"_(milli|micro|kilo|mega|percent|minutes|hours|ms)", row.name)
    assert row.help
    assert not row.help.endswith(".")
    if re.search(r"\bseconds\b", row.help, re.IGNORECASE):
        assert "_seconds" in row.name
    # Nothing that grows with the run: no step, prompt, sample or group in a label.
    bounded = {
        "answer",
        "bound",
        "code",
        "decoding",
        "gpu",
        "name",
        "operation",
        "phase",
        "purpose",
        "scorer",
        "service",
        "state",
        "statistic",
        "stream",
        "term",
    }
    assert set(row.labels) <= bounded
