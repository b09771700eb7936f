"""docs/runbook.md as a dashboard, a panel a section, so that a panel's link finds it without leaving Grafana."""

import re
from pathlib import Path

from board import COLUMNS, SCHEMA_VERSION, TAG, Json

SOURCE = Path(__file__).parents[3] / "docs" / "runbook.md"
UID = "trivet-runbook"
HEIGHT = 10


def anchor(heading: str) -> str:
    """As Markdown renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """Body by heading; what stands before the first is the introduction."""
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {heading.strip(): body.strip() for heading, _, body in (part.partition("\n") for part in parts)}


def panel_ids(text: str) -> dict[str, int]:
    """By anchor."""
    return {anchor(heading): number for number, heading in enumerate(sections(text), start=1)}


def runbook_board(text: str) -> Json:
    ids = panel_ids(text)
    panels = [
        {
            "type": "text",
            "id": ids[anchor(heading)],
            "title": heading,
            "gridPos": {"x": COLUMNS // 2 * (index % 2), "y": HEIGHT * (index // 2), "w": COLUMNS // 2, "h": HEIGHT},
            "options": {"mode": "markdown", "content": _linked(body, ids)},
            "fieldConfig": {"defaults": {}, "overrides": []},
        }
        for index, (heading, body) in enumerate(sections(text).items())
    ]
    return {
        "uid": UID,
        "title": "Trivet / Runbook",
        "description": "What each alert means, what causes it, and what to do.",
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 0,
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": []},
        "panels": panels,
    }


def _linked(body: str, ids: dict[str, int]) -> str:
    """Links between sections as links between panels."""
    return re.sub(r"\]\(#([\w-]+)\)", lambda match: f"](/d/{UID}?viewPanel={ids[match.group(1)]})", body)
