import os

from loadtest.cores import on_cores, split_cores


def test_server_and_clients_share_no_core_where_there_are_two() -> None:
    server, clients = split_cores()
    mine = os.sched_getaffinity(0)
    assert {*server, *clients} == mine
    assert len(mine) == 1 or not {*server} & {*clients}


def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with on_cores([min(before)]):
        pass
    assert os.sched_getaffinity(0) == before
