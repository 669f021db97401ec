"""The table of all metrics in `docs/monitoring.md`, made from the server's own catalogue.

`python -m monitoring.metric_list` writes it between the two marks of that file; a test compares both.
"""

from pathlib import Path

from asyncserve.metrics.catalogue import METRICS, PREFIX
from asyncserve.metrics.vllm_names import HISTOGRAMS, SIMPLE, VLLM_PREFIX

FILE = Path(__file__).parent.parent / "docs" / "monitoring.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def table() -> str:
    """Return the table of our metrics, and the list of vLLM's names."""
    rows = [
        f"| `{metric.name}` | {metric.kind.value}"
        f" | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.unit} | {metric.meaning} |"
        for metric in METRICS
    ]
    others = ", ".join(
        f"`{name}`" if name == ours else f"`{name}` (`{ours}`)"
        for name, ours in sorted({**SIMPLE, **{name: ours for name, (ours, _) in HISTOGRAMS.items()}}.items())
    )
    return "\n".join(
        [
            f"Names have the prefix `{PREFIX}`, all metrics the labels `model_name` and `engine`.",
            "",
            "| name | type | further labels | unit | meaning |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"With `--metrics-compat vllm`, under `{VLLM_PREFIX}` (in brackets ours, where it is called"
            f" otherwise): {others}.",
        ]
    )


def inserted(text: str) -> str:
    """Return the document with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(inserted(FILE.read_text(encoding="utf-8")), encoding="utf-8")
