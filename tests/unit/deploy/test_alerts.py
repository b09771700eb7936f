"""The rules name metrics that exist, and each alert has its section in the runbook and its unit tests."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.metric_tables import series_names

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
ANCHORS = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE)}
NAMES = {rule["alert"] for rule in ALERTS}


def test_every_alert_has_a_section_and_every_section_an_alert():
    urls = {rule["annotations"]["runbook_url"] for rule in ALERTS}
    assert urls == {f"docs/runbook.md#{anchor}" for anchor in ANCHORS}


def test_every_section_says_which_alert_it_is_about():
    assert set(re.findall(r"^`(Trivet\w+)`, (?:warning|critical)", RUNBOOK, re.MULTILINE)) == NAMES


def test_links_inside_the_runbook_lead_somewhere():
    assert set(re.findall(r"\]\(#([\w-]+)\)", RUNBOOK)) <= ANCHORS


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_and_how_bad(rule):
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    severity = re.search(rf"^`{rule['alert']}`, (\w+)", RUNBOOK, re.MULTILINE).group(1)
    assert severity == rule["labels"]["severity"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_name_what_exists(rule):
    recorded = set(re.findall(r"run:trivet_\w+:\w+", rule["expr"]))
    metrics = set(re.findall(r"(?<![\w:])trivet_\w+", rule["expr"]))
    assert recorded <= RECORDED
    assert metrics <= series_names()
    assert recorded or metrics


def test_backlog_names_each_service_by_the_queue_before_it():
    named = {rule["labels"]["service"]: rule["expr"] for rule in ALERTS if rule["alert"] == "TrivetBacklog"}
    queues = {service: re.search(r'stream="(\w+)"', expr).group(1) for service, expr in named.items()}
    assert queues == {"rollout": "prompts", "reward": "samples", "trainer": "scored"}


def test_each_alert_is_tested_both_ways():
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    fires, silent = set(), set()
    for test in tests:
        expected = test["promql_expr_test"]
        assert all(each["expr"] == 'ALERTS{alertstate="firing"}' for each in expected)
        firing = [set(re.findall(r'alertname="(\w+)"', str(each["exp_samples"]))) for each in expected]
        fires |= set().union(*firing)
        silent |= set().union(*firing) if set() in firing else set()
    assert fires == NAMES
    assert silent == NAMES


def test_inhibitions_name_alerts_that_exist():
    config = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text(encoding="utf-8"))
    assert set(re.findall(r"Trivet\w+", str(config["inhibit_rules"]))) <= NAMES


def test_prometheus_scrapes_each_service_by_its_name():
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {"rollout", "reward", "trainer"} <= jobs.keys()
    assert all(jobs[name]["authorization"]["credentials_file"] for name in ("rollout", "reward", "trainer"))
