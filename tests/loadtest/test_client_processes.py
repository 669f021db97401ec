import pytest

from loadtest import ceiling
from loadtest.client_processes import running, shares
from loadtest.cores import split_cores
from loadtest.sender import Job
from loadtest.workload import Sample, text
from tests.fakes.openai_server import ScriptedServer
from tests.loadtest.on_a_thread import on_a_thread


def job(count: int, concurrency: int | None, times: list[float] | None = None) -> Job:
    samples = [Sample((number,), 1) for number in range(count)]
    return Job(urls=("one", "two"), model="m", items=samples, times=times, concurrency=concurrency)


def test_items_times_and_concurrency_are_divided_without_rest() -> None:
    parts = shares(job(10, 5, [float(number) for number in range(10)]), 3)
    sent = [(item, due_s) for part in parts for item, due_s in zip(part.items, part.times or (), strict=True)]
    assert sorted(sent, key=lambda pair: pair[1]) == [(Sample((number,), 1), number) for number in range(10)]
    assert [part.concurrency for part in parts] == [2, 2, 1]
    assert [part.urls for part in parts] == [("one",), ("two",), ("one",)]


def test_no_process_is_left_without_work() -> None:
    assert [part.concurrency for part in shares(job(10, 2), 4)] == [1, 1]
    assert len(shares(job(1, 8), 4)) == 1
    assert [part.concurrency for part in shares(job(8, None), 2)] == [None, None]


def test_a_client_without_a_process_of_its_own_sends_in_this_one() -> None:
    with on_a_thread(ScriptedServer()) as server, running(0) as clients:
        sent = clients.run(Job(urls=(server.url,), model="m", items=text(5, input_len=3, output_len=4)))
    assert clients.count == 1
    assert sum(record.num_output_tokens for record in sent.records) == 20
    (share,) = sent.cpu_shares
    assert share > 0
    ends = max(record.ended_s for record in sent.records), min(record.started_s for record in sent.records)
    assert sent.duration_s == ends[0] - ends[1] > 0


@pytest.mark.slow
def test_processes_read_every_token_of_servers_that_only_replay() -> None:
    server_cores, client_cores = split_cores()
    with running(2, client_cores) as clients:
        for endpoint in ("completions", "chat"):
            found = ceiling.measure(
                clients, concurrency=8, endpoint=endpoint, num_requests=12, cores=server_cores
            )
            assert found.is_sound
            assert (found.num_processes, found.concurrency) == (2, 8)
            assert found.replayed_tps > 0
            assert found.tps == pytest.approx(found.replayed_tps / found.cpu_share)
