import pytest

from asyncserve.errors import ConfigError
from asyncserve.kv_events.settings import KVEventsSettings, read_settings


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{}",
        '{"endpoint": "tcp://*:1"}',
        '{"enable_kv_cache_events": false, "publisher": "zmq"}',
        '{"enable_kv_cache_events": true, "publisher": "null"}',
    ],
)
def test_nothing_is_published_unless_it_is_asked_for(text: str | None) -> None:
    assert read_settings(text) is None


def test_defaults_are_the_fields() -> None:
    settings = read_settings('{"enable_kv_cache_events": true, "publisher": null}')
    assert settings == KVEventsSettings(enable_kv_cache_events=True)
    assert (settings.endpoint, settings.replay_endpoint, settings.topic) == ("tcp://*:5557", None, "")
    assert (settings.buffer_steps, settings.hwm, settings.max_queue_size) == (10_000, 100_000, 100_000)


def test_every_value_is_read() -> None:
    settings = read_settings(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc:///tmp/e", "hwm": 0,'
        ' "replay_endpoint": "tcp://*:5558", "buffer_steps": 5, "max_queue_size": 7, "topic": "kv@pod@model"}'
    )
    assert settings is not None
    assert (settings.endpoint, settings.replay_endpoint) == ("ipc:///tmp/e", "tcp://*:5558")
    assert (settings.buffer_steps, settings.hwm, settings.max_queue_size) == (5, 0, 7)
    assert settings.topic == "kv@pod@model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enabled", "JSON is malformed"),
        ("[]", "Expected `object`, got `array`"),
        ('{"endpoints": "x"}', "unknown field `endpoints`"),
        ('{"publisher": "kafka"}', r"Invalid enum value 'kafka' - at `\$\.publisher`"),
        ('{"buffer_steps": 0}', r"`int` >= 1 - at `\$\.buffer_steps`"),
        ('{"hwm": -1}', r"`int` >= 0 - at `\$\.hwm`"),
        ('{"hwm": 3000000000}', r"`int` <= 1000000000 - at `\$\.hwm`"),
        ('{"buffer_steps": 3000000000}', r"`int` <= 1000000000 - at `\$\.buffer_steps`"),
        ('{"max_queue_size": "many"}', r"Expected `int`, got `str` - at `\$\.max_queue_size`"),
        ('{"enable_kv_cache_events": 1}', "Expected `bool`, got `int`"),
        ('{"topic": "\udc80"}', "surrogates not allowed"),
        ('{"endpoint": "tcp://*:99999"}', r"endpoint is 'tcp://\*:99999'; a port lies in \[0, 65535\]"),
        ('{"endpoint": "tcp://[::]:-1"}', "a port lies in"),
        ('{"replay_endpoint": "tcp://*:70000"}', r"replay_endpoint is 'tcp://\*:70000'; a port lies in"),
        (
            '{"endpoint": "inproc://events"}',
            "endpoint is 'inproc://events', which links threads of one process",
        ),
        (
            '{"replay_endpoint": "inproc://x"}',
            "replay_endpoint is 'inproc://x'.* tcp:// and ipc:// reach others",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(text)
