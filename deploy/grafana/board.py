"""Grafana's dashboard model, as little of it as these dashboards need: panels on a grid of 24 columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41
COLUMNS = 24
TAG = "trivet"

Json = dict[str, Any]
Color = Literal["green", "orange", "red"]
Unit = Literal["short", "none", "percentunit", "s", "bytes", "Bps", "ops", "dateTimeFromNow", "sci"]


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Threshold:
    """From `value` on (None: from the bottom) the panel takes `color`."""

    value: float | None
    color: Color


@dataclass(frozen=True)
class Panel:
    """`alerts` are anchors of docs/runbook.md: the panel links to what to do about what it shows."""

    kind: Literal["timeseries", "stat", "heatmap"]
    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    thresholds: Sequence[Threshold] = ()
    alerts: Sequence[str] = ()
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    decimals: int | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    by_instance: bool = False
    runbook: dict[str, int] = field(default_factory=dict)

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
            "links": [_board_links()],
            "annotations": {"list": [_alert_annotation()]},
            "templating": {"list": _variables(self.by_instance)},
            "panels": self._panels(),
        }

    def _panels(self) -> list[Json]:
        placed: list[Json] = []
        y, identity = 0, 1
        for row in self.rows:
            inside: list[Json] = []
            header = identity
            identity += 1
            top = y + 1
            x, line = 0, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, top, line = 0, top + line, 0
                place = {"x": x, "y": top, "w": panel.width, "h": panel.height}
                inside.append(_panel(panel, identity, place, self.runbook))
                x, line, identity = x + panel.width, max(line, panel.height), identity + 1
            placed.append(_row(row, header, y, inside if row.collapsed else []))
            placed += [] if row.collapsed else inside
            y = y + 1 if row.collapsed else top + line
        return placed


def _row(row: Row, identity: int, y: int, inside: list[Json]) -> Json:
    return {
        "type": "row",
        "id": identity,
        "title": row.title,
        "collapsed": row.collapsed,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        "panels": inside,
    }


def _panel(panel: Panel, identity: int, place: Json, runbook: dict[str, int]) -> Json:
    defaults: Json = {"unit": panel.unit, "color": {"mode": _color_mode(panel)}, "mappings": []}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    steps = panel.thresholds or (Threshold(None, "green"),)
    defaults["thresholds"] = {
        "mode": "absolute",
        "steps": [{"value": step.value, "color": step.color} for step in steps],
    }
    if panel.kind == "timeseries":
        defaults["custom"] = _lines(panel)
    return {
        "type": panel.kind,
        "id": identity,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "links": [_runbook_link(anchor, runbook[anchor]) for anchor in panel.alerts],
        "targets": [_target(query, index, panel.kind) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _color_mode(panel: Panel) -> str:
    return "thresholds" if panel.kind == "stat" else "palette-classic"


def _target(query: Query, index: int, kind: str) -> Json:
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": kind != "stat",
        "instant": kind == "stat",
        "format": "heatmap" if kind == "heatmap" else "time_series",
    }


def _lines(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        "axisPlacement": "auto",
    }


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "steps": 64,
            "exponent": 0.5,
            "fill": "dark-blue",
            "scale": "exponential",
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "yAxis": {"axisPlacement": "left"},
    },
}


def _variables(by_instance: bool) -> list[Json]:
    datasource = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "current": {"text": "Prometheus", "value": "prometheus"},
        "includeAll": False,
        "multi": False,
    }
    run = _query_variable("run", "Run", "label_values(trivet_build_info, run)", every=False)
    instance = _query_variable(
        "instance", "Instance", 'label_values(trivet_build_info{run="$run"}, instance)', every=True
    )
    return [datasource, run, *([instance] if by_instance else [])]


def _query_variable(name: str, label: str, query: str, *, every: bool) -> Json:
    variable: Json = {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": every,
        "multi": every,
    }
    return variable | ({"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if every else {})


def _board_links() -> Json:
    return {
        "type": "dashboards",
        "title": "Trivet",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _runbook_link(anchor: str, panel: int) -> Json:
    """The runbook is a dashboard too, a panel an alert."""
    return {
        "type": "link",
        "title": f"Runbook: {anchor.replace('-', ' ')}",
        "url": f"/d/trivet-runbook?viewPanel={panel}",
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": True,
        "targetBlank": True,
        "icon": "doc",
        "tooltip": "",
    }


def _alert_annotation() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Trivet.*", alertstate="firing", run="$run"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{service}} {{instance}}",
        "step": "60s",
    }
