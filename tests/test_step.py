import pickle

from hypothesis import given
from hypothesis import strategies as st

from asyncserve.step import ScheduledRows, ScheduledSequence, StepPlan

ROWS = st.lists(
    st.builds(ScheduledSequence, st.integers(0, 99), st.integers(0, 99), st.integers(0, 9), st.booleans())
)


def columns(rows: list[ScheduledSequence]) -> ScheduledRows:
    return ScheduledRows(*map(list, zip(*rows, strict=True))) if rows else ScheduledRows.of(())


@given(ROWS)
def test_columns_read_as_the_rows_they_were_made_of(rows: list[ScheduledSequence]) -> None:
    read = columns(rows)
    assert list(read) == [read[idx] for idx in range(len(read))] == rows
    assert all(type(row) is ScheduledSequence for row in read)
    assert read[1:-1] == tuple(rows[1:-1])
    assert read.num_tokens == sum(row.num_tokens for row in rows)
    assert read.num_samples == sum(row.samples for row in rows)
    assert repr(read) == repr(tuple(rows))


@given(ROWS, ROWS)
def test_plans_are_equal_if_their_rows_are_however_they_were_given(
    rows: list[ScheduledSequence], others: list[ScheduledSequence]
) -> None:
    plan = StepPlan(step_id=0, sequences=columns(rows))
    assert plan.sequences == tuple(rows) == plan.rows
    assert plan == StepPlan(step_id=0, sequences=tuple(rows)) == pickle.loads(pickle.dumps(plan))
    assert (plan == StepPlan(step_id=0, sequences=tuple(others))) == (rows == others)
