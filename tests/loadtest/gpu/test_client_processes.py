import pytest

from loadtest.gpu.client_processes import ceiling, running, shares
from loadtest.gpu.server_process import split_cores
from loadtest.workload import Sample


def test_samples_and_concurrency_are_divided_without_rest() -> None:
    samples = [Sample((i,), 1) for i in range(10)]
    divided = shares(samples, 5, 3)
    assert sorted(sample.prompt for part, _ in divided for sample in part) == [(i,) for i in range(10)]
    assert [at_once for _, at_once in divided] == [2, 2, 1]
    assert [at_once for _, at_once in shares(samples, 2, 4)] == [1, 1]
    assert len(shares(samples[:1], 8, 4)) == 1


@pytest.mark.slow
def test_processes_read_every_token_of_servers_that_only_replay() -> None:
    server_cores, client_cores = split_cores()
    with running(2, client_cores) as clients:
        reports = [  # the processes go on to the next load
            ceiling(clients, num_servers=2, cores=server_cores, concurrency=8, num_requests=12)
            for _ in range(2)
        ]
    report = reports[-1]
    assert report.is_sound, report.failures
    assert report.num_output_tokens == 12 * 128
    assert report.num_prompt_tokens == 12 * 512
    assert report.latencies["itl"].count == 12 * 127
    assert report.output_throughput > 0
