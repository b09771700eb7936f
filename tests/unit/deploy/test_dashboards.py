"""The dashboards are current, are put together alike, and ask for metrics that exist."""

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.metric_tables import series_names

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "deploy" / "grafana"
BOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((GRAFANA / "dashboards").glob("*.json"))
}
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
RUNBOOK = BOARDS["trivet-runbook"]


def panels(board: dict) -> list[dict]:
    return [
        panel
        for top in board["panels"]
        for panel in (top, *top.get("panels", []))
        if panel["type"] not in ("row", "text")
    ]


QUERIES = [
    pytest.param(target["expr"], id=f"{name}/{panel['title']}/{target['refId']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
    for target in panel["targets"]
]
PANELS = [
    pytest.param(panel, id=f"{name}/{panel['title']}") for name, board in BOARDS.items() for panel in panels(board)
]


def test_there_is_one_for_the_run_stability_the_data_plane_the_services_and_the_runbook():
    assert BOARDS.keys() == {"trivet-run", "trivet-stability", "trivet-data-plane", "trivet-services", "trivet-runbook"}
    assert all(board["uid"] == name for name, board in BOARDS.items())


def test_the_committed_files_are_what_the_builder_writes():
    checked = subprocess.run(
        [sys.executable, GRAFANA / "build.py", "--check"], check=False, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_asks_for_what_exists_and_for_the_chosen_run_alone(expr):
    recorded = set(re.findall(r"run:trivet_\w+:\w+", expr))
    metrics = set(re.findall(r"(?<![\w:])trivet_\w+", expr))
    assert recorded <= RECORDED
    assert metrics <= series_names()
    selectors = re.findall(r"(?:trivet_\w+(?::\w+)?|process_\w+|ALERTS)\{([^}]*)\}", expr)
    assert selectors
    assert all('run="$run"' in selector for selector in selectors)
    assert len(selectors) == len(re.findall(r"\b(?:trivet_\w+|process_\w+_\w+|ALERTS)\b", expr))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_explains_itself(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("panel", PANELS)
def test_a_link_leads_to_the_section_that_it_names(panel):
    titles = {f"/d/trivet-runbook?viewPanel={section['id']}": section["title"] for section in RUNBOOK["panels"]}
    for link in panel["links"]:
        assert link["title"].lower() == f"runbook: {titles[link['url']]}".lower()


def test_every_alert_is_linked_from_a_panel():
    linked = {link["url"] for board in BOARDS.values() for panel in panels(board) for link in panel["links"]}
    assert linked == {f"/d/trivet-runbook?viewPanel={section['id']}" for section in RUNBOOK["panels"]}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name):
    board = BOARDS[name]
    everything = [panel for top in board["panels"] for panel in (top, *top.get("panels", []))]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    for one, other in combinations([panel["gridPos"] for panel in board["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


@pytest.mark.parametrize("name", sorted(BOARDS.keys() - {"trivet-runbook"}))
def test_boards_can_be_turned_to_a_run(name):
    variables = {variable["name"]: variable for variable in BOARDS[name]["templating"]["list"]}
    assert {"datasource", "run"} <= variables.keys()
    used = set(re.findall(r"\$\{?(\w+)", " ".join(str(panel) for panel in BOARDS[name]["panels"])))
    assert used - {"__rate_interval"} <= variables.keys()
    assert variables.keys() <= used


def test_the_provisioned_data_source_is_the_default():
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    for name in BOARDS.keys() - {"trivet-runbook"}:
        variables = {variable["name"]: variable for variable in BOARDS[name]["templating"]["list"]}
        assert variables["datasource"]["current"]["value"] == source["uid"]
