from loadtest.parsing import CALLS, TOKEN, cost, messages


def test_every_message_is_read_as_its_calls() -> None:
    for name, text in messages().items():
        pieces = TOKEN.findall(text)
        assert "".join(pieces) == text
        assert len(cost(name, "none", pieces, 2, len(CALLS))) == 2
