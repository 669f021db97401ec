from tests.fakes.tokenizer import BOS_ID, TURN_ID
from tests.http.live import live_server


async def test_prompt_is_tokenized_with_and_without_special_tokens() -> None:
    async with live_server() as live:
        with_bos = (await live.call("/tokenize", {"prompt": "aé"})).json
        without = (await live.call("/tokenize", {"prompt": "a", "add_special_tokens": False})).json
        strings = (await live.call("/tokenize", {"prompt": "a", "return_token_strs": True})).json
    assert with_bos == {
        "count": 4,
        "max_model_len": 128,
        "tokens": [BOS_ID, 97, 0xC3, 0xA9],
        "token_strs": None,
    }
    assert without["tokens"] == [97]
    assert strings["token_strs"] == ["<bos>", "a"]


async def test_messages_are_tokenized_as_chat_would() -> None:
    messages = [{"role": "user", "content": "a"}]
    async with live_server() as live:
        opened = (await live.call("/tokenize", {"messages": messages})).json
        closed = (await live.call("/tokenize", {"messages": messages, "add_generation_prompt": False})).json
        usage = (await live.chat(messages=messages, max_tokens=1)).json["usage"]
    assert opened["tokens"][:2] == [BOS_ID, TURN_ID]
    assert opened["count"] == usage["prompt_tokens"]
    assert closed["count"] < opened["count"]


async def test_tokens_come_back_as_text() -> None:
    async with live_server() as live:
        answer = await live.call("/detokenize", {"tokens": [BOS_ID, 97, 0xC3, 0xA9]})
        empty = await live.call("/detokenize", {"tokens": []})
    assert answer.json == {"prompt": "<bos>aé"}
    assert empty.json == {"prompt": ""}


async def test_long_prompt_is_tokenized_off_the_loop() -> None:
    async with live_server() as live:
        answer = await live.call("/tokenize", {"prompt": "a" * 500_000})
        assert answer.json["count"] == 500_001
        assert "MainThread" not in live.engine.tokenizer.encoding_threads


async def test_messages_are_tokenized_with_tools_and_special_tokens_as_chat_would() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "a"}]
    async with live_server() as live:
        plain = (await live.call("/tokenize", {"messages": messages})).json
        special = (await live.call("/tokenize", {"messages": messages, "add_special_tokens": True})).json
        tools = (await live.call("/tokenize", {"messages": messages, "tools": [tool]})).json
        bad = await live.call("/tokenize", {"messages": messages, "tools": [{"type": "custom"}]})
        text = (await live.call("/detokenize", {"tokens": tools["tokens"]})).json["prompt"]
    assert special["tokens"] == [BOS_ID, *plain["tokens"]]
    assert '"name": "f"' in text
    assert (bad.status, bad.error["param"]) == (400, "tools[0].type")
