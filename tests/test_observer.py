"""Several observers as one: each is told, none can harm another."""

import logging

import pytest

from asyncserve.errors import Overloaded
from asyncserve.observer import NullObserver, Observer, ObserverGroup, RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan
from tests.fakes.observer import RecordingObserver

PLAN = StepPlan(step_id=0, sequences=())
OUTPUT = StepOutput(step_id=0, token_ids=())


class RaisingObserver:
    """Raises at every call."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def tell(observer: Observer) -> None:
    """Make every call of the protocol once."""
    observer.step_applied(PLAN, OUTPUT, (0.25,), 1.0)
    observer.first_token(RequestTimeline(arrived_s=1.0), 1)
    observer.request_finished(RequestTimeline(arrived_s=1.0), FinishReason.STOP)
    observer.request_rejected(Overloaded("full", retry_after_s=1.0))
    observer.loop_lag(0.5)
    observer.stage_ran("plan", 3, 1.0, 2.0)


def test_every_call_reaches_every_observer() -> None:
    first, second = RecordingObserver(), RecordingObserver()
    tell(ObserverGroup([first, second]))
    for observer in (first, second):
        assert observer.steps == [(PLAN, OUTPUT, [0.25], 1.0)]
        assert len(observer.first_tokens) == len(observer.finished) == len(observer.rejected) == 1
        assert observer.lags_s == [0.5]
        assert observer.stages == [("plan", 3, 1.0, 2.0)]


def test_an_observer_that_raises_harms_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    last = RecordingObserver()
    raising: Observer = RaisingObserver()  # type: ignore[assignment]
    group = ObserverGroup([raising, last])
    with caplog.at_level(logging.ERROR):
        tell(group)
        tell(group)
    assert len(last.steps) == len(last.first_tokens) == len(last.finished) == len(last.rejected) == 2
    assert last.lags_s == [0.5, 0.5]
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info


def test_observers_come_and_go() -> None:
    group, one = ObserverGroup([NullObserver()]), RecordingObserver()
    group.add(one)
    group.loop_lag(1.0)
    group.remove(one)
    group.remove(one)
    group.loop_lag(2.0)
    assert one.lags_s == [1.0]


def test_every_call_of_the_protocol_is_handed_on() -> None:
    calls = {name for name in vars(Observer) if not name.startswith("_")}
    assert calls == {name for name in vars(NullObserver) if not name.startswith("_")}
    assert calls <= set(vars(ObserverGroup))
