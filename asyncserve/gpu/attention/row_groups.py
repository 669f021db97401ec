"""Which pages of which rows are gathered: none that a window has passed, and rows of similar length together.

Takes lengths on the host, gives numbers of pages and lists of rows. A backend gathers a group's pages side by
side, padded to its longest row, so a group costs its padded pages in time and memory; but every group is some
kernel launches more. Knows no tensor.
"""

from collections.abc import Sequence

from asyncserve.gpu.batch import Batch
from asyncserve.kv_spec import FullAttention


def passed_pages(batch: Batch, spec: FullAttention) -> list[int]:
    """Return how many leading pages of each row none of its tokens sees: they may belong to others by now."""
    return [
        spec.num_unseen(seq_len - query_len)
        for seq_len, query_len in zip(batch.seq_lens_host, batch.query_lens_host, strict=True)
    ]


def similar_rows(num_pages: Sequence[int], *, free_padding: int, most_pages: int) -> list[list[int]]:
    """Split rows into groups of similar length.

    Args:
        num_pages: Of each row.
        free_padding: Pages of a group that may be padding whatever its size.
        most_pages: Of a group, padding included; a longer row is a group of its own.

    Returns:
        Row indices, each once; in order if there is one group. At most a quarter of a group's pages are
        padding, or `free_padding` pages if that is more.
    """
    if not num_pages:
        return []
    longest = max(num_pages)
    total = sum(num_pages)
    padded = longest * len(num_pages)
    if padded <= most_pages and padded - total <= max(free_padding, total // 3):
        return [list(range(len(num_pages)))]
    groups: list[list[int]] = []
    used, longest = 0, 0
    for row in sorted(range(len(num_pages)), key=num_pages.__getitem__, reverse=True):
        pages = num_pages[row]
        if groups:
            padded = longest * (len(groups[-1]) + 1)
            if padded <= most_pages and padded - used - pages <= max(free_padding, (used + pages) // 3):
                groups[-1].append(row)
                used += pages
                continue
        groups.append([row])
        used, longest = pages, pages
    return groups
