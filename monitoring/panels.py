"""The kinds of panels the dashboard has, each with its unit, legend and colours.

Takes a title, queries and a unit, gives a panel of grafana-foundation-sdk. In an expression `$select` stands
for the label matchers that the dashboard's variables choose. Knows no metric.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

Panel = timeseries.Panel | stat.Panel | heatmap.Panel
SELECT = 'job=~"$job",model_name=~"$model_name",instance=~"$instance"'
SELECT_PROCESS = 'job=~"$job",instance=~"$instance"'
SOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
STAT_HEIGHT = 4
WIDTH = 8
QUANTILES = (0.5, 0.9, 0.99)


class Query(NamedTuple):
    """An expression, with `$select` and `$process`, and what its series are called."""

    expression: str
    legend: str


class Limit(NamedTuple):
    """From `value` on a number is shown in this colour."""

    value: float
    color: str


def quantiles(metric: str, *, by: str = "") -> list[Query]:
    """Return the queries for the median, p90 and p99 of a histogram, over all chosen servers."""
    rates = f"sum by (le{by and ', ' + by}) (rate({metric}_bucket{{$select}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({q}, {rates})", f"p{q * 100:g}") for q in QUANTILES]


def lines(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str,
    limits: Sequence[Limit] = (),
    stacked: bool = False,
    top: float | None = None,
) -> timeseries.Panel:
    """Return a panel of lines, or of areas on top of each other.

    Args:
        text: What is seen, and what to do about it.
        unit: As Grafana names it.
        limits: Lines drawn across the panel.
        top: Highest value the axis has to show.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTH)
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if top is not None:
        panel.axis_soft_max(top)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if limits:
        panel.thresholds(_thresholds(limits)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        )
    return panel.targets(_targets(queries))


def number(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str,
    limits: Sequence[Limit] = (),
    decimals: int | None = None,
) -> stat.Panel:
    """Return a panel with one number, coloured by `limits`, before its course."""
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .height(STAT_HEIGHT)
        .span(4)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(limits))
    )
    if decimals is not None:
        panel.decimals(decimals)
    return panel.targets(_targets([query]))


def distribution(title: str, text: str, metric: str, *, unit: str) -> heatmap.Panel:
    """Return a panel that shows how a histogram's values are spread, and how that changes."""
    query = Query(f"sum by (le) (rate({metric}_bucket{{$select}}[$__rate_interval]))", "{{le}}")
    target = _target("A", query).format(prometheus_models.PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(WIDTH)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Spectral")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
            .reverse(True)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .targets([target])
    )


def choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable that chooses among a label's values; all of them at first."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard_models.VariableOption(selected=True, text="All", value="$__all"))
    )


def expand(expression: str, selectors: Mapping[str, str] | None = None) -> str:
    """Return an expression as it stands in the dashboard."""
    for name, selector in (selectors or {"$select": SELECT, "$process": SELECT_PROCESS}).items():
        expression = expression.replace(name, selector)
    return expression


def _targets(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    return [_target(chr(ord("A") + position), query) for position, query in enumerate(queries)]


def _target(name: str, query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(name)
        .datasource(SOURCE)
        .expr(expand(query.expression))
        .legend_format(query.legend)
        .range()
    )


def _thresholds(limits: Sequence[Limit]) -> dashboard.ThresholdsConfig:
    steps = [dashboard_models.Threshold(value=None, color="green")]
    steps += [dashboard_models.Threshold(value=limit.value, color=limit.color) for limit in limits]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(steps)
