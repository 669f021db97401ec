import dataclasses
from array import array
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest

from asyncserve.errors import InvalidRequest, PromptTooLong
from asyncserve.loop.admission import (
    LONG_TEXT_LEN,
    SMALL_TEXT_LEN,
    SMALL_TOKENS_LEN,
    Admission,
    is_long,
    is_quick,
    is_small,
    prompt_field,
    seed_of_choice,
)
from asyncserve.request import ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokensPrompt
from tests.fakes.tokenizer import BOS_ID, END_TURN_ID, EOS_ID, TURN_ID, FakeTokenizer

MAX_LEN = 80


def check_length(prompt_len: int, max_output_len: int) -> None:
    if prompt_len >= MAX_LEN:
        raise PromptTooLong(f"{prompt_len} >= {MAX_LEN}", param="prompt")
    if prompt_len + max_output_len > MAX_LEN:
        raise PromptTooLong(f"{prompt_len} + {max_output_len} > {MAX_LEN}", param="max_tokens")


def check_search(width: int, prompt_len: int, max_output_len: int) -> None:
    if width > 4:
        raise InvalidRequest(f"{width} rows of {prompt_len} + {max_output_len}", param="best_of")
    if width * (prompt_len + max_output_len) > 2 * MAX_LEN:
        raise InvalidRequest(f"{width} rows of {prompt_len} + {max_output_len}", param="max_tokens")


def admission(*, has_chat_template: bool = True, vocab_size: int = 512) -> Admission:
    return Admission(
        tokenizer=FakeTokenizer(has_chat_template=has_chat_template),
        vocab_size=vocab_size,
        max_sequence_len=MAX_LEN,
        check_admissible=check_length,
        check_search=check_search,
    )


def request(prompt: Prompt, *, truncate: int | None = None, **sampling: Any) -> Request:
    return Request(
        request_id="r",
        prompt=prompt,
        sampling=SamplingParams(**sampling),
        arrival_s=0.0,
        truncate_prompt_tokens=truncate,
    )


def tokens(num_tokens: int) -> TokensPrompt:
    return TokensPrompt(token_ids=[7] * num_tokens)


def chat(*messages: Mapping[str, Any]) -> ChatPrompt:
    return ChatPrompt(messages=messages)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TextPrompt(text="ab"), [BOS_ID, 97, 98]),
        (TextPrompt(text="ab", add_special_tokens=False), [97, 98]),
        (TokensPrompt(token_ids=(1, 2, 511)), [1, 2, 511]),
        (
            chat({"role": "user", "content": "a"}),
            [BOS_ID, TURN_ID, *b"user:a", END_TURN_ID, TURN_ID, *b"assistant:"],
        ),
    ],
)
def test_each_form_of_prompt_becomes_token_ids(prompt: Prompt, expected: list[int]) -> None:
    ids = admission().encode_prompt(request(prompt))
    assert isinstance(ids, array)
    assert ids.typecode == "i"
    assert list(ids) == expected


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (request(TextPrompt(text="", add_special_tokens=False)), "prompt", "empty"),
        (request(TokensPrompt(token_ids=())), "prompt", "empty"),
        (
            request(TokensPrompt(token_ids=(1, 512))),
            "prompt",
            "id 512; the vocabulary has ids 0 to 511",
        ),
        (request(TokensPrompt(token_ids=(1, -3))), "prompt", "token id -3"),
        (request(TokensPrompt(token_ids=(2**40,))), "prompt", "no token id"),
        (request(TokensPrompt(token_ids=("a",))), "prompt", "no token id"),  # type: ignore[arg-type]
        (request(TextPrompt(text="a"), stop_token_ids=(3, 512)), "stop_token_ids", "token id 512"),
        (request(TextPrompt(text="a"), logit_bias={512: 1.0}), "logit_bias", "token id 512"),
        (request(TextPrompt(text="\ud800")), "prompt", "surrogate"),
        (request(chat({"role": "user", "content": "\ud800"})), "messages", "surrogate"),
        (request(chat({"role": "wizard", "content": "a"})), "messages", "wizard"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(bad: Request, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        admission().encode_prompt(bad)
    assert caught.value.param == param


def test_messages_are_refused_without_a_chat_template() -> None:
    with pytest.raises(InvalidRequest, match="template") as caught:
        admission(has_chat_template=False).encode_prompt(request(chat({"role": "user", "content": "a"})))
    assert caught.value.param == "messages"


def test_text_is_refused_when_the_model_has_no_row_for_its_tokens() -> None:
    with pytest.raises(InvalidRequest, match="token id 120; the vocabulary has ids 0 to 99"):
        admission(vocab_size=100).encode_prompt(request(TextPrompt(text="x", add_special_tokens=False)))


def admit(asked: Request, seed: int = 5, **limits: Any) -> list[Any]:
    subject = admission(**limits)
    return subject.admit(asked, subject.encode_prompt(asked), seed=seed, sequence_ids=count(40))


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"),
    [(10, 5, 5), (10, 70, 70), (10, None, 70), (79, None, 1), (79, 1, 1)],
)
def test_output_length_is_what_was_asked_or_what_fits(
    prompt_len: int, max_tokens: int | None, expected: int
) -> None:
    (sequence,) = admit(request(tokens(prompt_len), max_tokens=max_tokens))
    assert sequence.max_output_len == expected


def test_a_beam_search_is_as_long_as_its_rows_fit_if_nobody_says_how_long() -> None:
    sequences = admit(request(tokens(10), n=4, use_beam_search=True, max_tokens=None))
    assert [each.max_output_len for each in sequences] == [2 * MAX_LEN // 4 - 10] * 4
    for max_tokens, expected in ((5, 5), (30, 30)):
        (sequence, *_) = admit(request(tokens(10), n=4, use_beam_search=True, max_tokens=max_tokens))
        assert sequence.max_output_len == expected
    (sequence, *_) = admit(request(tokens(30), n=4, use_beam_search=True))
    assert sequence.max_output_len == 10
    asked = request(tokens(10), n=4, use_beam_search=True, max_tokens=10**9)
    (sequence, *_) = admit(dataclasses.replace(asked, cuts_max_tokens=True))
    assert sequence.max_output_len == 30
    for prompt_len, max_tokens in ((10, 31), (40, None), (40, 1)):
        with pytest.raises(InvalidRequest) as refused:
            admit(request(tokens(prompt_len), n=4, use_beam_search=True, max_tokens=max_tokens))
        assert refused.value.param == "max_tokens"


def test_a_beam_search_that_is_too_wide_names_the_field_that_asked_for_it() -> None:
    for param in ("n", "best_of"):
        with pytest.raises(InvalidRequest) as refused:
            admit(request(tokens(1), use_beam_search=True, max_tokens=1, **{param: 5}))
        assert refused.value.param == param


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 5), (10**9, MAX_LEN - 60), (None, MAX_LEN - 60)])
def test_output_limit_is_cut_to_what_is_left_for_those_who_want_it_so(
    max_tokens: int | None, expected: int
) -> None:
    asked = dataclasses.replace(request(tokens(60), max_tokens=max_tokens), cuts_max_tokens=True)
    (sequence,) = admit(asked)
    assert sequence.max_output_len == expected


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "param", "message"),
    [
        (80, None, "prompt", "80 >= 80"),
        (140, 1, "prompt", "140 >= 80"),
        (60, 21, "max_tokens", r"60 \+ 21 > 80"),
    ],
)
def test_what_can_never_fit_is_refused(
    prompt_len: int, max_tokens: int | None, param: str, message: str
) -> None:
    with pytest.raises(PromptTooLong, match=message) as caught:
        admit(request(tokens(prompt_len), max_tokens=max_tokens))
    assert caught.value.param == param


def test_a_long_conversation_is_told_to_shorten_its_messages() -> None:
    with pytest.raises(PromptTooLong) as caught:
        admit(request(chat({"role": "user", "content": "x" * 200}), max_tokens=None))
    assert caught.value.param == "messages"


def test_choices_of_neighbouring_seeds_do_not_repeat_each_other_and_the_first_has_the_requests_own() -> None:
    seeds = [seed_of_choice(seed, index) for seed in range(-8, 8) for index in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [seed_of_choice(seed, 0) for seed in (0, 5, 2**63 - 1)] == [0, 5, 2**63 - 1]


@pytest.mark.parametrize(
    ("text", "size"),
    [("x" * 2000, "2000 characters"), ("ä" * 1030, "2060 bytes"), ("\ud800" * 1030, "3090 bytes")],
)
def test_text_that_no_tokens_could_hold_is_refused_with_the_numbers_before_it_is_encoded(
    text: str, size: str
) -> None:
    # The longest token of the fake's vocabulary is `<turn>`, of six bytes.
    subject = Admission(
        tokenizer=FakeTokenizer(),
        vocab_size=512,
        max_sequence_len=300,
        check_admissible=check_length,
        check_search=check_search,
    )
    assert isinstance(subject.tokenizer, FakeTokenizer)
    for prompt, param in (
        (TextPrompt(text=text), "prompt"),
        (chat({"role": "user", "content": text}), "messages"),
    ):
        with pytest.raises(PromptTooLong, match=r"cannot fit: .* 300 tokens .* 6 bytes") as caught:
            subject.encode_prompt(request(prompt))
        assert caught.value.param == param
        assert param == "messages" or size in caught.value.message
    assert subject.tokenizer.encoding_threads == []
    assert len(subject.encode_prompt(request(TextPrompt(text="x" * 1800)))) == 1801


def test_texts_that_take_long_to_encode_are_long_and_token_ids_are_not() -> None:
    assert is_long(TextPrompt(text="x" * (LONG_TEXT_LEN + 1)))
    assert not is_long(TextPrompt(text="x" * LONG_TEXT_LEN))
    assert not is_long(tokens(LONG_TEXT_LEN + 1))


def test_n_makes_as_many_sequences_with_seeds_of_their_own() -> None:
    asked = request(tokens(3), n=3)
    sequences = admit(asked, seed=2**63 - 2)
    assert [sequence.sequence_id for sequence in sequences] == [40, 41, 42]
    assert [sequence.index for sequence in sequences] == [0, 1, 2]
    assert [sequence.seed for sequence in sequences] == [seed_of_choice(2**63 - 2, i) for i in range(3)]
    assert all(sequence.request is sequences[0].request for sequence in sequences)
    assert sequences[0].request.sampling is asked.sampling
    assert all(list(sequence.prompt_token_ids) == [7, 7, 7] for sequence in sequences)


def test_what_a_prompt_was_made_from_is_not_held_once_there_are_its_tokens() -> None:
    [sequence] = admit(request(TextPrompt(text="abc")))
    assert sequence.request.prompt == TokensPrompt(token_ids=sequence.prompt_token_ids)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {EOS_ID}),
        ({"stop_token_ids": (3, 4)}, {EOS_ID, 3, 4}),
        ({"stop_token_ids": (3,), "ignore_eos": True}, {3}),
        ({"ignore_eos": True}, set()),
    ],
)
def test_eos_joins_the_stop_tokens_unless_ignored(sampling: dict[str, Any], expected: set[int]) -> None:
    (sequence,) = admit(request(tokens(3), **sampling))
    assert sequence.stop_token_ids == expected


def test_only_small_prompts_are_encoded_in_place() -> None:
    assert is_small(TextPrompt(text="x" * SMALL_TEXT_LEN))
    assert not is_small(TextPrompt(text="x" * (SMALL_TEXT_LEN + 1)))
    assert is_small(tokens(SMALL_TOKENS_LEN))
    assert not is_small(tokens(SMALL_TOKENS_LEN + 1))
    assert not is_small(chat({"role": "user", "content": "a"}))


def test_rendered_conversation_is_taken_as_the_text_it_is() -> None:
    messages = ({"role": "user", "content": "a"},)
    rendered = ChatPrompt(messages=messages, rendered="xy", add_special_tokens=True)
    assert is_small(rendered)
    assert list(admission().encode_prompt(request(rendered))) == [BOS_ID, *b"xy"]
    assert not is_small(ChatPrompt(messages=messages, rendered="x" * (SMALL_TEXT_LEN + 1)))
    assert is_long(ChatPrompt(messages=messages, rendered="x" * (LONG_TEXT_LEN + 1)))


def test_errors_name_the_field_the_prompt_came_from() -> None:
    assert prompt_field(chat()) == "messages"
    assert prompt_field(TextPrompt(text="")) == "prompt"
    assert prompt_field(tokens(1)) == "prompt"


@pytest.mark.parametrize(
    ("prompt", "truncate", "expected"),
    [
        (TextPrompt(text="abc"), 2, [98, 99]),
        (TextPrompt(text="abc"), 4, [BOS_ID, 97, 98, 99]),
        (TextPrompt(text="abc"), 9, [BOS_ID, 97, 98, 99]),
        (TokensPrompt(token_ids=[5, 6, 7]), 1, [7]),
        (TokensPrompt(token_ids=[600, 6, 7]), 2, [6, 7]),  # what is cut off is not looked at
        (TokensPrompt(token_ids=[9] * 1000), 3, [9] * 3),
        (chat({"role": "user", "content": "a"}), 3, list(b"nt:")),
    ],
)
def test_a_truncated_prompt_keeps_its_last_tokens(prompt: Prompt, truncate: int, expected: list[int]) -> None:
    assert list(admission().encode_prompt(request(prompt, truncate=truncate))) == expected


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(30, MAX_LEN - 30), (None, MAX_LEN - 1), (MAX_LEN + 5, 1)]
)
def test_minus_one_keeps_as_many_prompt_tokens_as_leave_room_for_the_output(
    max_tokens: int | None, expected: int
) -> None:
    for prompt in (tokens(500), TextPrompt(text="a" * 5000)):
        asked = request(prompt, truncate=-1, max_tokens=max_tokens)
        assert len(admission().encode_prompt(asked)) == expected


def test_minus_one_leaves_room_for_the_output_length_nobody_asked_for() -> None:
    assert len(admission().encode_prompt(request(tokens(500), truncate=-1))) == MAX_LEN - 16


def test_of_a_long_text_only_the_end_is_encoded_and_its_tokens_are_those_of_the_whole() -> None:
    lengths: list[int] = []

    class Counting(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
            lengths.append(len(text))
            return super().encode(text, add_special_tokens=add_special_tokens)

    subject = admission()
    subject.tokenizer = Counting()
    text = "abcdefg" * 10_000
    kept = subject.encode_prompt(request(TextPrompt(text=text), truncate=50))
    assert bytes(kept.tolist()) == text[-50:].encode()
    assert lengths[0] <= 2 * MAX_LEN * 7  # no token of the fake has more bytes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ab"], [(97, 98), (32, 97, 98)]),
        (["  ab"], [(97, 98), (32, 97, 98)]),
        (["a", "a", " a"], [(97,), (32, 97)]),
        (["\n"], [(10,)]),
        (["<end>"], [(END_TURN_ID,), (32, END_TURN_ID)]),
        ([], []),
    ],
)
def test_a_bad_word_is_spelled_with_a_space_before_it_and_without(
    words: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert list(admission().encode_bad_words(request(tokens(1), bad_words=words))) == expected


def test_a_bad_word_that_the_model_has_no_tokens_for_is_left_out_and_one_that_is_no_text_is_refused() -> None:
    small = admission(vocab_size=100)
    assert small.encode_bad_words(request(tokens(1), bad_words=["ax", "b"])) == ((98,), (32, 98))
    with pytest.raises(InvalidRequest) as caught:
        small.encode_bad_words(request(tokens(1), bad_words=["\ud800"]))
    assert caught.value.param == "bad_words"


def test_allowed_tokens_must_be_in_the_vocabulary_and_not_all_forbidden() -> None:
    subject = admission()
    for bad in ([5, 512], [2**31], [2**40]):
        with pytest.raises(InvalidRequest) as caught:
            subject.encode_prompt(request(tokens(1), allowed_token_ids=bad))
        assert caught.value.param == "allowed_token_ids"

    def admit(*, allowed: list[int], **sampling: Any) -> None:
        asked = request(tokens(1), allowed_token_ids=allowed, **sampling)
        words = subject.encode_bad_words(asked)
        subject.admit(asked, array("i", [7]), seed=0, sequence_ids=count(), bad_words=words)

    admit(allowed=[97, 98], bad_words=["a"])
    admit(allowed=[97], bad_words=["ab"])
    admit(allowed=[EOS_ID])
    admit(allowed=[EOS_ID], min_tokens=1, ignore_eos=True)
    for sampling in (
        {"allowed": [97, 97], "bad_words": ["a"]},
        {"allowed": [EOS_ID, 5], "min_tokens": 1, "stop_token_ids": [5]},
        {"allowed": [EOS_ID, 97], "min_tokens": 1, "bad_words": ["a"]},
    ):
        with pytest.raises(InvalidRequest, match="forbid") as caught:
            admit(**sampling)  # type: ignore[arg-type]
        assert caught.value.param == "allowed_token_ids"


def test_bad_words_and_long_lists_of_allowed_tokens_are_worked_on_in_a_thread() -> None:
    assert is_quick(request(tokens(1), allowed_token_ids=[5] * SMALL_TOKENS_LEN))
    assert not is_quick(request(tokens(1), allowed_token_ids=[5] * (SMALL_TOKENS_LEN + 1)))
    assert not is_quick(request(tokens(1), bad_words=["a"]))
    assert not is_quick(request(tokens(SMALL_TOKENS_LEN + 1)))
