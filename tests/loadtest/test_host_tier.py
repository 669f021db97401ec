"""The program that measures the host tier, at a tiny size on a processor: does it do what its rows say."""

import json
from pathlib import Path

import pytest

from loadtest import host_tier
from tests.loadtest.gpu.extents import ON_CPU, tiny_shape

pytestmark = pytest.mark.slow


def test_every_way_is_measured_and_finds_what_it_says(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    file = tmp_path / "figures.json"
    argv = ["--shape", str(shape.folder), "--lens", "16", "40", "--num-prompts", "12", "--prompt-len", "44"]
    argv += ["--output-len", "3", "--host-gib", "0.01", "--repeats", "1", "--json", str(file), "--option"]
    options = {**ON_CPU, "max_num_batched_tokens": 64, "block_size": 4, "num_threads": 1}
    argv += [f"{name}={value}" for name, value in options.items()]
    assert host_tier.main(argv) == 0
    rows = json.loads(file.read_text())["rows"]
    swaps = [row for row in rows if row["kind"] == "swap"]
    assert [row["context_len"] for row in swaps] == [16, 40]
    assert [row["num_bytes"] for row in swaps] == [each * shape.kv_bytes_per_token(4) for each in (16, 40)]
    assert all(row[name] > 0 for row in swaps for name in ("recompute_ms", "store_ms", "load_ms"))
    found = {
        row["way"]: (row["hit_share"], row["host_hit_tokens"]) for row in rows if row["kind"] == "prefixes"
    }
    assert len(found) == 6
    shared = 32 / 44  # 33 tokens, in whole blocks
    for way, (hit_share, host_hit_tokens) in found.items():
        assert hit_share == pytest.approx(shared if "75 %" in way else 0.0)
        assert (host_hit_tokens > 0) == (way == "75 % on the host")


@pytest.mark.parametrize("argv", [["--shape", "none"], ["--option", "x"]])
def test_a_wrong_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert host_tier.main(argv) == 2
    assert "error" in capsys.readouterr().err
