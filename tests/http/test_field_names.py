import pytest

from asyncserve.errors import InvalidRequest, PromptTooLong, RequestError
from asyncserve.http.field_names import FieldNames
from asyncserve.http.messages.translation import FIELD_NAMES as MESSAGES
from asyncserve.http.responses.input import FIELD_NAMES as RESPONSES


@pytest.mark.parametrize(
    ("names", "error", "message", "param"),
    [
        (
            RESPONSES,
            InvalidRequest("max_tokens is 0", param="max_tokens"),
            "max_output_tokens is 0",
            "max_output_tokens",
        ),
        (
            RESPONSES,
            PromptTooLong("messages is long; with max_tokens it is longer", param="messages"),
            "input is long; with max_output_tokens it is longer",
            "input",
        ),
        (
            RESPONSES,
            InvalidRequest("messages[3] is bad", param="messages[3].content"),
            "input[3] is bad",
            "input",
        ),
        (
            RESPONSES,
            InvalidRequest("tools[1].function.name is x", param="tools[1].function.name"),
            "tools[1].name is x",
            "tools[1].name",
        ),
        (RESPONSES, InvalidRequest("seed is x", param="seed"), "seed is x", "seed"),
        (RESPONSES, InvalidRequest("messages", param=None), "messages", None),
        (
            MESSAGES,
            InvalidRequest("max_completion_tokens is 0", param="max_completion_tokens"),
            "max_tokens is 0",
            "max_tokens",
        ),
        (
            MESSAGES,
            InvalidRequest("stop has 70 stop strings", param="stop"),
            "stop_sequences has 70 stop strings",
            "stop_sequences",
        ),
        (
            MESSAGES,
            InvalidRequest("tools[0].function.name is 'a b'", param="tools[0].function.name"),
            "tools[0].name is 'a b'",
            "tools[0].name",
        ),
        (
            MESSAGES,
            InvalidRequest("messages[1].tool_calls: no name", param="messages[1].tool_calls"),
            "messages[1].tool_calls: no name",
            "messages",
        ),
    ],
)
def test_errors_name_fields_as_the_client_did(
    names: FieldNames, error: RequestError, message: str, param: str | None
) -> None:
    with pytest.raises(RequestError) as raised, names.errors_as_asked():
        raise error
    assert raised.value is error
    assert (str(error), error.message, error.param) == (message, message, param)


def test_errors_of_other_kinds_pass_as_they_are() -> None:
    error = ZeroDivisionError("messages")
    assert RESPONSES.as_asked(error) is error
