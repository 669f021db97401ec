import logging

import msgspec
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.schema import HARMLESS, UNSUPPORTED, BodyDecoder, ChatBody, CompletionBody


def test_unknown_field_is_ignored_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert decoder.decode(b'{"model": "a", "foo": 1}', CompletionBody).model == "a"
        decoder.decode(b'{"prompt": "a", "bar": 1}', CompletionBody)
    assert [record.args for record in caplog.records] == [("foo",), ("bar",)]


def test_warnings_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder()
    names = {f"name{number}": 0 for number in range(2 * decoder.MAX_WARNED)}
    with caplog.at_level(logging.WARNING):
        decoder.decode(msgspec.json.encode(names), CompletionBody)
    assert len(caplog.records) == decoder.MAX_WARNED


def test_harmless_field_is_ignored_silently(caplog: pytest.LogCaptureFixture) -> None:
    body = msgspec.json.encode(dict.fromkeys(HARMLESS, None))
    with caplog.at_level(logging.WARNING):
        BodyDecoder().decode(body, ChatBody)
    assert not caplog.records


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_field_is_taken_only_when_it_means_off(name: str) -> None:
    kind = ChatBody if name == "echo" else CompletionBody
    decoder = BodyDecoder()
    for value in (None, *UNSUPPORTED[name]):
        decoder.decode(msgspec.json.encode({name: value}), kind)
    with pytest.raises(InvalidRequest) as raised:
        decoder.decode(msgspec.json.encode({name: {"some": "thing"}}), kind)
    assert raised.value.param == name


def test_field_is_in_one_list_only() -> None:
    supported = {*CompletionBody.__struct_fields__} & {*ChatBody.__struct_fields__}
    assert not HARMLESS & set(UNSUPPORTED)
    assert not supported & set(UNSUPPORTED)


def test_wrong_type_deep_inside_names_the_top_field_and_the_path() -> None:
    body = b'{"messages": [{"role": "user", "tool_calls": [{}, 3]}]}'
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.tool_calls\[1\]: Expected `object`") as raised:
        BodyDecoder().decode(body, ChatBody)
    assert raised.value.param == "messages"
