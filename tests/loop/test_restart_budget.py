from asyncserve.loop.restart_budget import WINDOW_S, RestartBudget


def test_no_more_restarts_than_allowed_within_the_window_and_again_after_it() -> None:
    budget = RestartBudget(2)
    assert budget.spend(0.0)
    assert budget.spend(1.0)
    assert not budget.spend(WINDOW_S)
    assert budget.spend(WINDOW_S + 0.5)
    assert not budget.spend(WINDOW_S + 0.6)
    assert budget.num_restarts == 3


def test_none_is_allowed_if_the_limit_is_none() -> None:
    assert not RestartBudget(0).spend(0.0)
