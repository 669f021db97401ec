"""The memory ledger of the KV cache: of what is allocated, what holds tokens, and what does not.

Takes what the executor offers and the engine's statistics, gives the answer of GET /kv_cache. `python -m
asyncserve.http.kv_ledger [URL]` asks a server for it and prints it as a table; the API key comes from the
variable API_KEY.

A block of the pool is used (held by a sequence), cached (free, its content findable) or free. Of the bytes
of used blocks, those of slots behind the last token of a sequence are unused, and those of storages for which
a group has no layer are padding; the rest holds tokens or states. Blocks in the host's memory stand by
themselves, if it has any.
"""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from asyncserve.kv_spec import KVGroup, RecurrentState, SlidingWindow, pool_bytes_per_block
from asyncserve.observer import EngineStatistics, KVGroupStatistics
from asyncserve.step import ExecutorInfo


def kv_ledger(info: ExecutorInfo, statistics: EngineStatistics) -> dict[str, Any]:
    """Return the ledger of this moment, as GET /kv_cache tells it."""
    block_bytes = pool_bytes_per_block(info.kv_groups)
    groups = [
        _group_ledger(info.kv_groups[each.group_id], each, block_bytes) for each in statistics.kv_groups
    ]
    num_used, num_cached = statistics.num_blocks_used, statistics.num_blocks_cached
    slots = {name: sum(group[name] for group in groups) for name in ("slots", "unused_slots")}
    return {
        "block_bytes": block_bytes,
        "num_bytes": info.kv_groups[0].num_blocks * block_bytes,
        "num_blocks": statistics.num_blocks,
        "used_blocks": num_used,
        "cached_blocks": num_cached,
        "free_blocks": statistics.num_blocks - num_used - num_cached,
        "used_bytes": num_used * block_bytes,
        "unused_bytes": sum(group["unused_bytes"] for group in groups),
        "padding_bytes": sum(group["padding_bytes"] for group in groups),
        **slots,
        "filled_share": 1 - slots["unused_slots"] / slots["slots"] if slots["slots"] else 1.0,
        "window_blocks_freed": statistics.num_window_blocks_freed,
        "groups": groups,
        "host": _host_ledger(statistics, block_bytes) if statistics.num_host_blocks else None,
    }


def _host_ledger(statistics: EngineStatistics, block_bytes: int) -> dict[str, Any]:
    num_used, num_cached = statistics.num_host_blocks_used, statistics.num_host_blocks_cached
    return {
        "num_bytes": (statistics.num_host_blocks + 1) * block_bytes,
        "num_blocks": statistics.num_host_blocks,
        "used_blocks": num_used,
        "cached_blocks": num_cached,
        "free_blocks": statistics.num_host_blocks - num_used - num_cached,
        "swapped_sequences": statistics.num_swapped,
        "stored_bytes": statistics.host_stored_bytes,
        "loaded_bytes": statistics.host_loaded_bytes,
    }


def _group_ledger(group: KVGroup, statistics: KVGroupStatistics, block_bytes: int) -> dict[str, Any]:
    spec = group.spec
    keeps_state = isinstance(spec, RecurrentState)
    kind = "state" if keeps_state else "window" if isinstance(spec, SlidingWindow) else "full"
    num_used = statistics.num_blocks_used
    unused_bytes = 0
    if not keeps_state:
        unused_bytes = statistics.num_slots_unused * (group.bytes_per_block // spec.block_len)
    return {
        "group": group.group_id,
        "kind": kind,
        "num_layers": len(group.layer_ids),
        "block_size": None if keeps_state else spec.block_len,
        "window": spec.window_len if isinstance(spec, SlidingWindow) else None,
        "used_blocks": num_used,
        "cached_blocks": statistics.num_blocks_cached,
        "slots": statistics.num_slots,
        "unused_slots": statistics.num_slots_unused,
        "used_bytes": num_used * block_bytes,
        "unused_bytes": unused_bytes,
        "padding_bytes": num_used * (block_bytes - group.bytes_per_block),
    }


def ledger_table(ledger: Mapping[str, Any]) -> str:
    """Return a ledger as lines of text."""
    mib = 2**20
    lines = [
        f"pool   {ledger['num_blocks']} blocks of {ledger['block_bytes']} bytes:"
        f" {ledger['num_bytes'] / mib:.1f} MiB",
        f"blocks {ledger['used_blocks']} used, {ledger['cached_blocks']} cached,"
        f" {ledger['free_blocks']} free",
        f"used   {ledger['used_bytes'] / mib:.1f} MiB, of which slots without a token"
        f" {ledger['unused_bytes'] / mib:.2f} MiB, padding {ledger['padding_bytes'] / mib:.2f} MiB",
        f"slots  {ledger['slots']} allocated, {ledger['unused_slots']} unused:"
        f" {ledger['filled_share']:.1%} hold tokens",
        f"freed  {ledger['window_blocks_freed']} blocks that a window had passed",
        *_host_lines(ledger["host"]),
        "",
        f"{'group':>5} {'kind':<7}{'layers':>7}{'block':>7}{'window':>8}{'used':>8}{'cached':>8}{'slots':>9}"
        f"{'unused':>8}{'MiB':>9}{'padding':>9}",
    ]
    lines += [
        f"{group['group']:>5} {group['kind']:<7}{group['num_layers']:>7}{group['block_size'] or '-':>7}"
        f"{group['window'] or '-':>8}{group['used_blocks']:>8}{group['cached_blocks']:>8}{group['slots']:>9}"
        f"{group['unused_slots']:>8}{group['used_bytes'] / mib:>9.2f}{group['padding_bytes'] / mib:>9.2f}"
        for group in ledger["groups"]
    ]
    return "\n".join(lines)


def _host_lines(host: Mapping[str, Any] | None) -> list[str]:
    if host is None:
        return []
    mib = 2**20
    return [
        f"host   {host['num_blocks']} blocks, {host['num_bytes'] / mib:.1f} MiB: {host['used_blocks']} used"
        f" by {host['swapped_sequences']} swapped sequences, {host['cached_blocks']} cached,"
        f" {host['free_blocks']} free; stored {host['stored_bytes'] / mib:.1f} MiB so far, loaded"
        f" {host['loaded_bytes'] / mib:.1f} MiB"
    ]


def main(argv: list[str]) -> int:
    """Print the ledger of the server at `argv[0]`; return the exit status."""
    url = (argv[0] if argv else "http://127.0.0.1:8000").rstrip("/") + "/kv_cache"
    key = os.environ.get("API_KEY")
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=10) as answer:
            print(ledger_table(json.load(answer)))
    except (KeyError, TypeError):
        print(f"kv_ledger: {url}: what answers there is no ledger", file=sys.stderr)
        return 1
    except (OSError, ValueError, http.client.HTTPException) as error:
        # An HTTP error tells its reason in the body.
        reason = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
        print(f"kv_ledger: {url}: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
