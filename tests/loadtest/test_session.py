import pytest

from loadtest import options
from loadtest.ceiling import Ceiling
from loadtest.sender import Sent
from loadtest.session import client_line, command_line, is_at_limit, more_processes, warnings
from tests.loadtest.records import record


def ceiling(tps: float) -> Ceiling:
    return Ceiling(
        tps=tps, replayed_tps=tps / 2, num_processes=1, concurrency=4, cpu_share=0.5, is_sound=True
    )


def sent(*, cpu_share: float = 0.1, late_ms: float = 0.0) -> Sent:
    found = Sent(records=[record()], cpu_shares=[0.05, cpu_share])
    found.late_s.extend([late_ms / 1000] * 100)
    return found


def test_a_figure_within_a_fifth_of_the_ceiling_is_warned_of() -> None:
    assert warnings(80.0, sent(), ceiling(100.0)) == []
    (warning,) = warnings(81.0, sent(), ceiling(100.0))
    assert "81% of what this client reaches at most (100 tok/s)" in warning
    assert warnings(81.0, sent(), None) == []


def test_a_late_loop_and_a_busy_client_are_warned_of() -> None:
    assert warnings(1.0, sent(late_ms=4.9, cpu_share=0.79), ceiling(100.0)) == []
    late, busy = warnings(1.0, sent(late_ms=5.1, cpu_share=0.81), ceiling(100.0))
    assert "5.1 ms late" in late
    assert "81% of the time" in busy
    short = sent(cpu_share=0.99)
    short.records = [record(ttft_s=0.1, e2el_s=0.9)]
    assert warnings(1.0, short, None) == []


def test_a_client_at_its_limit_is_doubled_while_half_the_cores_are_left_to_the_server() -> None:
    assert is_at_limit(81.0, sent(), ceiling(100.0))
    assert is_at_limit(1.0, sent(cpu_share=0.81), None)
    # More clients do not make a late loop earlier.
    assert not is_at_limit(1.0, sent(late_ms=50.0), ceiling(100.0))
    assert [more_processes(1, cores) for cores in (1, 2, 3, 4)] == [1, 1, 1, 2]
    assert [more_processes(4, cores) for cores in (8, 16)] == [4, 8]


def test_what_processes_sent_is_put_together() -> None:
    first = Sent(records=[record(started_s=2.0)], cpu_shares=[0.1], num_reconnects=1)
    second = Sent(records=[record(started_s=1.0, e2el_s=0.5)], cpu_shares=[0.3], num_reconnects=2)
    both = first.merged(second)
    assert both.duration_s == pytest.approx(2.1)
    assert (both.cpu_shares, both.num_reconnects) == ([0.1, 0.3], 3)


def test_the_client_is_told_of_in_a_line() -> None:
    client = {
        "num_processes": 2,
        "cpu_share": 0.5,
        "lag_p99_ms": 1.25,
        "lag_max_ms": 3.0,
        "num_reconnects": 2,
        "ceiling": {"tps": 123_456.0, "concurrency": 8},
    }
    line = client_line(client)
    assert "2 processes, busy 50%, loop late by 1.2 ms (p99), 3.0 (highest)" in line
    assert "at most 123,456 tok/s at 8 streams" in line
    assert "reconnected   2 x" in line


def test_a_key_is_not_kept_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--api-key", "secret", "--label", "a b"], ["--api-key=secret", "--label", "a b"]):
        line = command_line(words)
        assert "secret" not in line
        assert line.endswith("--label 'a b'")
    with pytest.raises(SystemExit):  # an option has one name, so that this one is always found
        options.parsed(["--api-k", "secret"])
    assert "--api-k" in capsys.readouterr().err
