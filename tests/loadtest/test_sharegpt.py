import json
from pathlib import Path

import pytest

from loadtest import sharegpt


def words(text: str) -> int:
    return len(text.split())


def talk(*said: str, roles: tuple[str, str] = ("human", "gpt")) -> dict[str, object]:
    return {"conversations": [{"from": roles[number % 2], "value": text} for number, text in enumerate(said)]}


def long(count: int) -> str:
    return "w " * count


def test_a_list_and_json_lines_and_messages_are_read(tmp_path: Path) -> None:
    entries = [
        talk("a", "b", "c", "d", "left over"),
        talk("only asked"),
        {"id": 7},
        talk("answers itself", "x", roles=("gpt", "human")),
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "r"},
            ]
        },
    ]
    wanted = [[("a", "b"), ("c", "d")], [("q", "r")]]
    as_list, as_lines = tmp_path / "list.json", tmp_path / "lines.jsonl"
    as_list.write_text(json.dumps(entries))
    as_lines.write_text("\n".join(map(json.dumps, entries)))
    assert sharegpt.read(as_list) == sharegpt.read(as_lines) == wanted


@pytest.mark.parametrize("content", ["[1]", "nothing", '[{"conversations": [{"value": "a"}]}]'])
def test_another_format_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is not in ShareGPT's format"):
        sharegpt.read(path)


def test_prompts_are_first_turns_and_outputs_as_long_as_the_answers() -> None:
    dialogues = [[(long(5), long(count)), ("more", "more")] for count in range(4, 24)]
    drawn = sharegpt.samples(dialogues, 10, count=words, seed=1)
    assert len(drawn) == 10
    assert {words(str(sample.prompt)) for sample in drawn} == {5}
    assert len({sample.max_tokens for sample in drawn}) == 10
    assert drawn == sharegpt.samples(dialogues, 10, count=words, seed=1)
    assert drawn != sharegpt.samples(dialogues, 10, count=words, seed=2)


def test_what_vllm_leaves_out_is_left_out() -> None:
    kept = (long(1000), long(1000))
    dialogues = [
        [(long(3), long(50))],  # a prompt that is too short
        [(long(50), long(3))],  # an answer that is too short
        [(long(1025), long(50))],  # a prompt that is too long
        [(long(1024), long(1025))],  # both together
        [kept],
    ]
    drawn = sharegpt.samples(dialogues, 3, count=words)
    assert [(str(sample.prompt), sample.max_tokens) for sample in drawn] == [(kept[0], 1000)] * 3
    # A length that is given makes that of the answer no matter.
    fixed = sharegpt.samples(dialogues, 20, count=words, output_len=7)
    assert {sample.max_tokens for sample in fixed} == {7}
    assert {words(str(sample.prompt)) for sample in fixed} == {50, 1000, 1024}


def test_conversations_end_where_they_would_be_too_long() -> None:
    dialogues = [[(long(400), long(400))] * 6, [("one turn", "alone")]]
    (drawn,) = sharegpt.conversations(dialogues, 1, num_turns=6, count=words)
    assert [turn.max_tokens for turn in drawn.turns] == [400, 400]
    (short,) = sharegpt.conversations(dialogues, 1, num_turns=3, count=words, output_len=1, think_time_s=1.0)
    assert [turn.max_tokens for turn in short.turns] == [1, 1, 1]
    assert len(short.pauses_s) == 2


def test_a_data_set_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="no conversation"):
        sharegpt.samples([[("a", "b")]], 1, count=words)
