import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.loop.queue_bounds import NOTHING, Load, LoadByTenant, QueueBounds


def reason(
    bounds: QueueBounds, asked: tuple[int, int], queued: tuple[int, int], of_tenant: tuple[int, int] = (0, 0)
) -> str | None:
    excess = bounds.excess(Load(*asked), queued=Load(*queued), of_tenant=Load(*of_tenant))
    return None if excess is None else excess.reason


def test_the_last_place_is_given_and_the_next_is_not() -> None:
    bounds = QueueBounds(max_sequences=4)
    assert reason(bounds, (1, 10), (3, 30)) is None
    assert reason(bounds, (1, 10), (4, 40)) == "queued_requests"
    assert reason(bounds, (2, 10), (3, 30)) == "queued_requests"


def test_a_call_that_never_fits_is_refused_for_good() -> None:
    with pytest.raises(InvalidRequest, match=r"5 sequences are asked for at once; .* at most 4 wait"):
        QueueBounds(max_sequences=4).excess(Load(5, 1), queued=NOTHING, of_tenant=NOTHING)


def test_tokens_are_bounded_where_that_is_asked_for() -> None:
    bounds = QueueBounds(max_sequences=100, max_tokens=1000)
    assert reason(bounds, (1, 400), (1, 600)) is None
    assert reason(bounds, (1, 401), (1, 600)) == "queued_tokens"
    assert reason(QueueBounds(max_sequences=100), (1, 10**9), (1, 600)) is None


def test_a_prompt_larger_than_the_bound_is_taken_when_nothing_waits() -> None:
    bounds = QueueBounds(max_sequences=100, max_tokens=1000)
    assert reason(bounds, (1, 5000), (0, 0)) is None
    excess = bounds.excess(Load(1, 5000), queued=Load(1, 10), of_tenant=NOTHING)
    assert excess is not None
    assert excess.load == Load(0, 10), "then it would be taken, and more cannot be started"


def test_excess_says_how_much_must_be_started_first() -> None:
    excess = QueueBounds(max_sequences=4).excess(Load(3, 1), queued=Load(3, 9), of_tenant=NOTHING)
    assert excess is not None
    error = excess.error(7.5)
    assert excess.load == Load(2, 0)
    assert (error.retry_after_s, error.reason) == (7.5, "queued_requests")
    assert "3 sequences are waiting, 3 more are asked for" in error.message


def fill(bounds: QueueBounds, tenants: int) -> list[int]:
    """Let so many tenants ask for a place each in turn until nobody gets one; return what each has."""
    counts = [0] * tenants
    while True:
        before = sum(counts)
        for tenant in range(tenants):
            if reason(bounds, (1, 1), (sum(counts), sum(counts)), (counts[tenant], counts[tenant])) is None:
                counts[tenant] += 1
        if sum(counts) == before:
            return counts


def test_whoever_comes_finds_room_under_fair_shares_however_many_others_push() -> None:
    shared = QueueBounds(max_sequences=1000, shares=True)
    assert fill(shared, 1) == [800]
    for tenants in (2, 3, 10):
        counts = fill(shared, tenants)
        assert max(counts) - min(counts) <= 1
        num_free = 1000 - sum(counts)
        assert num_free >= 1000 // (4 * tenants + 1)
        assert reason(shared, (1, 1), (sum(counts), 0), (0, 0)) is None
    assert fill(QueueBounds(max_sequences=1000), 1) == [1000]


def test_tokens_are_shared_like_places() -> None:
    shared = QueueBounds(max_sequences=10**6, max_tokens=1000, shares=True)
    assert fill(shared, 1) == [800]


def test_a_tenant_is_told_how_much_of_its_own_must_be_started() -> None:
    shared = QueueBounds(max_sequences=1000, shares=True)
    excess = shared.excess(Load(1, 1), queued=Load(900, 0), of_tenant=Load(850, 0))
    assert excess is not None
    num_started = excess.load.num_sequences
    assert reason(shared, (1, 1), (900 - num_started, 0), (850 - num_started, 0)) is None
    assert reason(shared, (1, 1), (901 - num_started, 0), (851 - num_started, 0)) == "tenant_share"


def test_even_the_smallest_queue_takes_something() -> None:
    assert reason(QueueBounds(max_sequences=1, shares=True), (1, 1), (0, 0)) is None


def test_loads_by_tenant_add_up_and_leave_nothing_behind() -> None:
    loads = LoadByTenant()
    loads.add("a", Load(1, 10))
    loads.add("b", Load(2, 20))
    loads.add("a", Load(1, 5))
    assert (loads.total, loads.of("a"), loads.of("c")) == (Load(4, 35), Load(2, 15), NOTHING)
    loads.remove("a", Load(1, 10))
    loads.remove("a", Load(1, 5))
    loads.remove("b", Load(2, 20))
    assert (loads.total, loads.of("a")) == (NOTHING, NOTHING)
