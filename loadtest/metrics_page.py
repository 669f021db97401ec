"""A page of /metrics, read: its samples with their labels, or added up by name.

Takes the text that Prometheus scrapes. Knows no server, and none of the names.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricSample(NamedTuple):
    """One line of the page; label values as they are escaped there."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(page: str) -> Iterator[MetricSample]:
    """Yield every sample."""
    for name, labels, value in _SAMPLE.findall(page):
        yield MetricSample(name, dict(_LABEL.findall(labels)), float(value))


def totals(page: str) -> Mapping[str, float]:
    """Return the values by name, those of all labels added up; 0 for what is not there."""
    values: dict[str, float] = defaultdict(float)
    for name, _, value in _SAMPLE.findall(page):
        values[name] += float(value)
    return values
