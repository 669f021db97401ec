import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncserve.http.kv_ledger import kv_ledger, ledger_table, main
from asyncserve.kv_spec import FullAttention, RecurrentState, SlidingWindow
from asyncserve.observer import EngineStatistics, KVGroupStatistics
from tests.fakes.executor import fake_info
from tests.http.live import live_server, spell

SIZE: dict[str, Any] = {"block_len": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
SPECS = (
    FullAttention(**SIZE),
    SlidingWindow(window_len=5, **SIZE),
    RecurrentState(state_bytes=60, page_bytes=32),
)


def test_the_ledger_says_of_every_byte_of_used_blocks_what_it_is_for() -> None:
    info = fake_info(specs=SPECS, num_blocks=101)
    groups = [
        KVGroupStatistics(
            group_id=group_id,
            num_blocks_used=used,
            num_blocks_cached=cached,
            num_slots=slots,
            num_slots_unused=unused,
        )
        for group_id, (used, cached, slots, unused) in enumerate(
            [(20, 5, 80, 7), (6, 3, 24, 7), (4, 0, 0, 0)]
        )
    ]
    statistics = EngineStatistics(
        num_blocks=100,
        num_blocks_used=30,
        num_blocks_cached=8,
        num_window_blocks_freed=9,
        kv_groups=groups,
    )
    ledger = kv_ledger(info, statistics)
    assert (ledger["block_bytes"], ledger["num_bytes"]) == (32, 101 * 32)
    assert (ledger["used_blocks"], ledger["cached_blocks"], ledger["free_blocks"]) == (30, 8, 62)
    assert (ledger["slots"], ledger["unused_slots"], ledger["unused_bytes"]) == (104, 14, 14 * 8)
    assert ledger["filled_share"] == pytest.approx(90 / 104)
    assert ledger["used_bytes"] == sum(group["used_bytes"] for group in ledger["groups"]) == 30 * 32
    assert [group["kind"] for group in ledger["groups"]] == ["full", "window", "state"]
    assert [group["window"] for group in ledger["groups"]] == [None, 5, None]
    assert [group["block_size"] for group in ledger["groups"]] == [4, 4, None]
    table = ledger_table(ledger)
    assert "30 used, 8 cached, 62 free" in table
    assert "104 allocated, 14 unused: 86.5% hold tokens" in table
    assert len(table.splitlines()) == 7 + 3


def test_a_group_with_fewer_layers_than_a_block_has_pages_pads() -> None:
    info = fake_info(specs=SPECS[:2])
    full, window = info.kv_groups
    info = replace(info, kv_groups=(replace(full, layer_ids=(0, 2, 3)), window))
    groups = [
        KVGroupStatistics(
            group_id=group_id, num_blocks_used=2, num_blocks_cached=0, num_slots=8, num_slots_unused=1
        )
        for group_id in (0, 1)
    ]
    ledger = kv_ledger(info, EngineStatistics(num_blocks=63, num_blocks_used=4, kv_groups=groups))
    assert [group["padding_bytes"] for group in ledger["groups"]] == [0, 2 * 2 * 32]
    assert [group["unused_bytes"] for group in ledger["groups"]] == [3 * 8, 8]


def test_blocks_on_the_host_stand_by_themselves() -> None:
    info = fake_info()
    assert kv_ledger(info, EngineStatistics())["host"] is None
    statistics = EngineStatistics(
        num_host_blocks=20,
        num_host_blocks_used=4,
        num_host_blocks_cached=9,
        num_swapped=2,
        host_stored_bytes=3 * 2**20,
        host_loaded_bytes=2**20,
    )
    ledger = kv_ledger(info, statistics)
    assert ledger["host"] == {
        "num_bytes": 21 * 32,
        "num_blocks": 20,
        "used_blocks": 4,
        "cached_blocks": 9,
        "free_blocks": 7,
        "swapped_sequences": 2,
        "stored_bytes": 3 * 2**20,
        "loaded_bytes": 2**20,
    }
    table = ledger_table(ledger)
    assert "4 used by 2 swapped sequences, 9 cached, 7 free; stored 3.0 MiB so far, loaded 1.0 MiB" in table


async def test_the_server_tells_its_ledger_and_the_program_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_server(
        next_token=spell("x" * 50), info={"specs": SPECS[:2]}, api_keys=("the-key",)
    ) as live:
        assert (await live.call("/kv_cache")).status == 401
        live.headers["Authorization"] = "Bearer the-key"
        live.executor.hold()
        running = asyncio.create_task(live.complete())
        await live.until_running(1)
        await live.until_step_waits()
        ledger = (await live.call("/kv_cache")).json
        monkeypatch.setenv("API_KEY", "the-key")
        status = await asyncio.to_thread(main, [live.url])
        monkeypatch.setenv("API_KEY", "wrong")
        refused = await asyncio.to_thread(main, [live.url])
        live.executor.resume()
        await running
    assert ledger["used_blocks"] > 0
    assert 0 < ledger["filled_share"] <= 1
    printed = capsys.readouterr()
    assert (status, refused) == (0, 1)
    assert ledger_table(ledger) in printed.out
    assert json.loads(printed.err.partition("kv_cache: ")[2])["error"]


@pytest.mark.parametrize(
    "url", ["foo", "http://[::", "http://127.0.0.1:1/ a", "ftp:", "http://127.0.0.1:1"], ids=repr
)
def test_the_program_says_of_an_address_what_is_wrong_with_it(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([url]) == 1
    assert capsys.readouterr().err.startswith(f"kv_ledger: {url}/kv_cache: ")


def test_the_program_tells_another_answer_from_a_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv_cache").write_text("{}")
    assert main([tmp_path.as_uri()]) == 1
    assert "no ledger" in capsys.readouterr().err
