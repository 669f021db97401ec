"""Reading `ASYNCSERVE_FAULTS`; what the faults do is in `tests/loop/test_engine_faults.py`."""

import logging
import threading
from typing import Any

import pytest

from asyncserve.cli import read_config
from asyncserve.config import FAULTS_VARIABLE, ServerConfig
from asyncserve.errors import ConfigError
from asyncserve.faults import Faults, FaultyExecutor, FaultyTokenizer, Trigger, parse_faults
from asyncserve.serve import injected_faults
from tests.fakes.executor import FakeExecutor
from tests.fakes.tokenizer import FakeTokenizer


def test_every_kind_of_fault_is_read() -> None:
    text = (
        "fail-step=100, hang-step=every:500:30s,nan-row=token:7,oom-step=every:70,lose-device=300,"
        "tokenizer=poison text,slow-disk=200ms,"
    )
    assert parse_faults(text) == Faults(
        steps={
            "fail-step": Trigger(step_id=100),
            "hang-step": Trigger(every=500, delay_s=30.0),
            "nan-row": Trigger(token_id=7),
            "oom-step": Trigger(every=70),
            "lose-device": Trigger(step_id=300),
        },
        poisoned_text="poison text",
        disk_delay_s=0.2,
    )
    assert parse_faults("hang-step=200:1.5s").steps["hang-step"] == Trigger(step_id=200, delay_s=1.5)


@pytest.mark.parametrize(
    ("text", "part", "what"),
    [
        ("fail-step", "fail-step", "KIND=VALUE"),
        ("fail-step=1,burn=2", "burn=2", "no such kind; known: fail-step, hang-step"),
        ("fail-step=soon", "fail-step=soon", "every:NUMBER"),
        ("fail-step=each:3", "fail-step=each:3", "every:NUMBER"),
        ("fail-step=every:0", "fail-step=every:0", "at least 1"),
        ("hang-step=3", "hang-step=3", "is written WHEN:TIME"),
        ("hang-step=3:30", "hang-step=3:30", "200ms or 30s"),
        ("hang-step=30s", "hang-step=30s", "is written WHEN:TIME"),
        ("slow-disk=slow", "slow-disk=slow", "200ms or 30s"),
        ("tokenizer=", "tokenizer=", "KIND=VALUE"),
    ],
)
def test_a_fault_that_cannot_be_read_is_named(text: str, part: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert str(caught.value).startswith(f"ASYNCSERVE_FAULTS: {part!r}: ")
    assert what in str(caught.value)


def test_without_faults_nothing_is_wrapped_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    faults = injected_faults({})
    executor, tokenizer = FakeExecutor(), FakeTokenizer()
    assert faults.around_executor(executor) is executor
    assert faults.around_tokenizer(tokenizer) is tokenizer  # type: ignore[comparison-overlap, arg-type]
    read: Any = int
    assert faults.around_read(read) is read
    assert not caplog.records


def test_that_faults_are_injected_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        faults = injected_faults({FAULTS_VARIABLE: "fail-step=3,tokenizer=x"})
    assert [record.message for record in caplog.records] == [
        "FAULTS ARE INJECTED ON PURPOSE (ASYNCSERVE_FAULTS): fail-step=3,tokenizer=x"
    ]
    assert isinstance(faults.around_executor(FakeExecutor()), FaultyExecutor)
    assert isinstance(faults.around_tokenizer(FakeTokenizer()), FaultyTokenizer)  # type: ignore[arg-type]


def test_a_slow_disk_is_read_from_all_the_same() -> None:
    read = threading.Event()
    parse_faults("slow-disk=1ms").around_read(read.set)()
    assert read.is_set()


def test_the_variable_is_no_option_and_no_mistake_either(caplog: pytest.LogCaptureFixture) -> None:
    read_config(["m"], {FAULTS_VARIABLE: "fail-step=1"}, ServerConfig)
    assert not caplog.records
