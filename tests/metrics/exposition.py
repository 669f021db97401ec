"""Reading what is exposed the way Prometheus does: as text."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from asyncserve.metrics.catalogue import PREFIX


def families_of(registry: CollectorRegistry) -> dict[str, Metric]:
    """Return every exposed metric by its name; a counter's without `_total`, as the parser has it."""
    return {
        family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())
    }


def samples_of(registry: CollectorRegistry, name: str) -> list[Sample]:
    """Return the samples called exactly this (prefix apart)."""
    return [
        sample
        for family in families_of(registry).values()
        for sample in family.samples
        if sample.name == PREFIX + name
    ]


def value_of(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Return the one sample of this name that has these labels."""
    (sample,) = [sample for sample in samples_of(registry, name) if labels.items() <= sample.labels.items()]
    return float(sample.value)


def buckets_of(registry: CollectorRegistry, name: str) -> list[tuple[float, float]]:
    """Return (upper bound, values up to it) of a histogram, in the order exposed."""
    return [(float(sample.labels["le"]), sample.value) for sample in samples_of(registry, f"{name}_bucket")]
