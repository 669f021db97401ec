import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.gpu import offline, steps
from loadtest.gpu.extent import FULL
from loadtest.gpu.vocabulary import write_tokenizer
from tests.loadtest.gpu.extents import ON_CPU, TINY, tiny_shape


def test_the_mix_is_nano_vllms() -> None:
    low, high = FULL.mix_lens
    prompts, output_lens = offline.mixed_requests(FULL.mix_requests, low, high, vocab_size=10_001)
    assert (sum(map(len, prompts)), sum(output_lens)) == (142_827, 133_966)
    assert prompts[0][:3] == [6311, 6890, 663]


@pytest.mark.slow
def test_every_measurement_is_made_on_a_real_engine(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", shape.vocab_size))
    rows = list(offline.measure(shape, tokenizer, TINY, further=ON_CPU))
    kinds = [row["kind"] for row in rows]
    assert kinds == [
        "engine-start",
        "first-token",
        *["decode"] * 2,
        "prefill",
        *["throughput"] * 2,
        "mix",
    ]
    for row, batch in zip(rows[2:4], TINY.batches, strict=True):
        assert row["batch"] == batch
        assert row["context_len"] == 16 + 8
        assert row["floor_bytes"] == shape.step_bytes(batch, 24)
        assert len(row["all_ms"]) == TINY.batches[batch]
        # All but the first of the long output's steps that decode, and the few in which a row is late.
        assert 4 <= row["steps"]["num_steps"] <= 11
    greedy, drawn = rows[5:7]
    assert (greedy["temperature"], drawn["temperature"]) == (0.0, 1.0)
    assert greedy["num_output_tokens"] == 4 * 6
    assert greedy["tps"] == pytest.approx(24 / min(greedy["all_s"]))


@pytest.mark.slow
def test_only_what_is_asked_for_is_measured_and_steps_alone_on_the_engine(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", shape.vocab_size))
    rows = list(offline.measure(shape, tokenizer, TINY, further=ON_CPU, only=["prefill"]))
    assert [row["kind"] for row in rows] == ["engine-start", "prefill"]
    found = list(steps.measure(shape, tokenizer, TINY, further=ON_CPU, batches=[1, 3], num_steps=5))
    assert [row["batch"] for row in found] == [1, 3]
    assert all(row["steps"]["num_steps"] == 5 for row in found)
    assert all(row["steps"]["interval_ms"] > 0 for row in found)


@pytest.mark.slow
def test_a_pool_of_the_same_bytes_holds_twice_as_many_requests_in_half_the_bits(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", shape.vocab_size))
    most = {}
    for kv_cache_dtype, num_bytes in (("bfloat16", 2), ("fp8", 1)):
        # 12 blocks of 16 positions in bfloat16; a request comes to two of them.
        pool = 12 * 16 * shape.kv_bytes_per_token()
        further = {
            **ON_CPU,
            "kv_cache_dtype": kv_cache_dtype,
            "kv_cache_memory_bytes": pool,
            "max_num_seqs": 16,
        }
        *_, row = offline.measure(shape, tokenizer, TINY, further=further, only=["capacity"])
        assert (row["kind"], row["kv_cache_dtype"], row["num_requests"]) == ("capacity", kv_cache_dtype, 12)
        assert row["num_blocks"] == 12 * 2 // num_bytes - 1
        assert row["median_running"] <= row["most_running"]
        assert offline.bytes_per_kv_value(further) == num_bytes
        most[kv_cache_dtype] = row["most_running"]
    assert most == {"bfloat16": 5, "fp8": 11}


@pytest.mark.slow
def test_a_measurement_that_fails_leaves_the_others(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", shape.vocab_size))
    # Longer than the context, so that the prompt is refused.
    extent = replace(TINY, decode_input_len=100)
    rows = offline.measure(shape, tokenizer, extent, further=ON_CPU)
    kinds = [row["kind"] for row in itertools.islice(rows, 5)]
    assert kinds == ["engine-start", "first-token", "throughput", "throughput", "mix"]
    with pytest.raises(RuntimeError, match=r"^decode: .*; prefill: "):
        next(rows)
