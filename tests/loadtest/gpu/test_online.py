from pathlib import Path

import pytest

from loadtest.gpu import online
from loadtest.gpu.vocabulary import write_tokenizer
from loadtest.server_process import ServerFailed
from tests.loadtest.gpu.extents import ON_CPU, TINY, tiny_shape


@pytest.mark.slow
def test_a_real_server_is_started_loaded_and_stopped(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", shape.vocab_size))
    start, one, four = online.measure(shape, tokenizer, TINY, further=ON_CPU, folder=tmp_path)
    assert 0 < start["listening_s"] <= start["ready_s"] <= start["first_token_s"] <= start["warm_s"]
    assert any("ready on" in line for line in start["log"])
    for row, load in zip((one, four), TINY.online_loads[""], strict=True):
        assert row["is_sound"], row["failures"]
        assert (row["concurrency"], row["num_requests"]) == (load.concurrency, load.num_requests)
        assert row["latencies_ms"]["ttft"]["count"] == load.num_requests
        assert row["tps"] == max(row["all_tps"]) > 0
        assert 0 <= row["idle_share"] < 1
        assert row["device_ms"] > 0
        assert row["server_cpu_us_per_token"] > 0
    assert "stopped" in (tmp_path / "server.log").read_text()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    with pytest.raises(ServerFailed, match=r"status 2:\n.*no-such-option"):
        list(
            online.measure_start(
                shape, str(tmp_path), TINY, further={"no_such_option": 1, **ON_CPU}, folder=tmp_path
            )
        )
