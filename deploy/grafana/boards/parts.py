"""What the boards' panels have in common."""

from collections.abc import Sequence

from board import Color, Panel, Query, Threshold, Unit

# Window of rates: of what happens all the time, and of what happens once a step.
FLOW, STEPWISE = "$__rate_interval", "10m"
RUN = 'run="$run"'
AT = 'run="$run", instance=~"$instance"'
QUANTILES = (("0.5", "median"), ("0.99", "99 %"))


def lines(
    title: str,
    description: str,
    unit: Unit,
    *queries: Query,
    width: int = 8,
    minimum: float | None = None,
    maximum: float | None = None,
    thresholds: Sequence[Threshold] = (),
    alerts: Sequence[str] = (),
    stacked: bool = False,
) -> Panel:
    return Panel(
        "timeseries",
        title,
        description,
        unit,
        queries,
        width=width,
        minimum=minimum,
        maximum=maximum,
        thresholds=thresholds,
        alerts=alerts,
        stacked=stacked,
    )


def number(
    title: str,
    description: str,
    unit: Unit,
    expr: str,
    *,
    decimals: int | None = None,
    thresholds: Sequence[Threshold] = (),
    alerts: Sequence[str] = (),
) -> Panel:
    return Panel(
        "stat",
        title,
        description,
        unit,
        (Query(expr),),
        width=3,
        height=4,
        decimals=decimals,
        thresholds=thresholds,
        alerts=alerts,
    )


def heatmap(title: str, description: str, metric: str, labels: str = RUN, window: str = STEPWISE) -> Panel:
    query = Query(f"sum by (le) (increase({metric}_bucket{{{labels}}}[{window}]))", "{{le}}")
    return Panel("heatmap", title, description, "short", (query,))


def last(metric: str, legend: str, labels: str = "") -> Query:
    """A gauge of the trainer: one series a run, whatever address the trainer had."""
    inside = f"{RUN}, {labels}" if labels else RUN
    return Query(f"max by (run) ({metric}{{{inside}}})", legend)


def each(metric: str, label: str, labels: str = RUN) -> Query:
    return Query(f"max by ({label}) ({metric}{{{labels}}})", f"{{{{{label}}}}}")


def rate(metric: str, legend: str, labels: str = RUN, by: str = "", window: str = FLOW) -> Query:
    """Per second; 0 where nothing has happened yet."""
    summed = f"sum by ({by}) " if by else "sum"
    return Query(f"{summed}(rate({metric}{{{labels}}}[{window}]))", legend)


def quantiles(metric: str, labels: str = RUN, by: str = "", window: str = FLOW) -> tuple[Query, ...]:
    group = f"le, {by}" if by else "le"
    prefix = f"{{{{{by}}}}} " if by else ""
    return tuple(
        Query(
            f"histogram_quantile({quantile}, sum by ({group}) (rate({metric}_bucket{{{labels}}}[{window}])))",
            prefix + name,
        )
        for quantile, name in QUANTILES
    )


def mean(metric: str, legend: str, labels: str = RUN, by: str = "", window: str = STEPWISE) -> Query:
    total, count = (
        f"sum{f' by ({by})' if by else ''} (rate({metric}_{part}{{{labels}}}[{window}]))" for part in ("sum", "count")
    )
    return Query(f"{total} / {count}", legend)


def counted(metric: str, by: str, labels: str = RUN) -> Query:
    """How many in an hour, by a label whose values come up one by one: with a zero as long as there is none."""
    return Query(
        f'sum by ({by}) (increase({metric}{{{labels}}}[1h])) or label_replace(vector(0), "{by}", "none", "", "")',
        f"{{{{{by}}}}}",
    )


def alarm(*steps: tuple[float, Color]) -> tuple[Threshold, ...]:
    """Green below the first step."""
    return (Threshold(None, "green"), *(Threshold(value, color) for value, color in steps))
