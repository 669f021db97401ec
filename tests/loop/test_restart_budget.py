from asyncserve.loop.restart_budget import LOSSES_OF_A_CULPRIT, WINDOW_S, RestartBudget


def test_no_more_restarts_than_allowed_within_the_window_and_again_after_it() -> None:
    budget = RestartBudget(2)
    assert budget.spend(0.0, 0) is None
    assert budget.spend(1.0, 1) is None
    assert "as often as it may be" in str(budget.spend(WINDOW_S, 2))
    assert budget.spend(WINDOW_S + 0.5, 3) is None
    assert budget.spend(WINDOW_S + 0.6, 4) is not None
    assert budget.num_restarts == 3


def test_none_is_allowed_if_the_limit_is_none() -> None:
    assert RestartBudget(0).spend(0.0, 0) is not None
    assert RestartBudget(0).spend(0.0, 0, {0}) is not None


def test_losses_that_a_request_explains_do_not_count_whatever_number_of_them() -> None:
    budget = RestartBudget(3)
    for first in range(0, 300, 3):
        assert budget.spend(first, first) is None
        assert budget.spend(first, first + 1) is None
        assert budget.spend(first, first + 2, {first, first + 1, first + 2}) is None
        budget.note_good()
    assert budget.num_restarts == budget.num_explained == 300


def test_losses_that_nothing_explains_count_among_those_that_are_explained() -> None:
    budget = RestartBudget(2)
    for number in range(0, 4, 2):
        assert budget.spend(0.0, number) is None
        assert budget.spend(0.0, number + 1, {number + 1}) is None
        budget.note_good()
    assert budget.spend(0.0, 4) is not None


def test_a_loss_that_two_culprits_caused_together_is_explained_once() -> None:
    budget = RestartBudget(3)
    budget.spend(0.0, 0)
    budget.spend(0.0, 1)
    budget.spend(0.0, 2, {0, 1, 2})
    budget.spend(0.0, 3)
    budget.spend(0.0, 4, {0, 3, 4})
    assert budget.num_explained == 5


def test_explained_losses_with_no_good_step_between_are_bounded_however_long_they_take() -> None:
    for good in (True, False):
        budget = RestartBudget(2)
        refusal, number = None, 0
        while refusal is None and number < 100:
            refusal = budget.spend(number * 2 * WINDOW_S, number, {number})
            number += 1
            if good:
                budget.note_good()
        if good:
            assert refusal is None
        else:
            assert "no step went well" in str(refusal)
            assert budget.num_restarts == 2 * LOSSES_OF_A_CULPRIT
