from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncserve.errors import InvariantError, StepFailed
from asyncserve.loop.detokenizer import Detokenizer, DetokenizerState
from asyncserve.loop.tokenizer import FastTokenizer, Tokenizer
from asyncserve.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenizedRequest,
    TokenLogprobs,
    Usage,
    merge_all,
)
from tests.fakes.small_tokenizers import byte_level_bpe, sentencepiece_bpe
from tests.fakes.tokenizer import EOS_ID, FakeTokenizer

_MIXED = "日本語 👩‍👩‍👧 🇩🇪 👍🏽 e\u0301 ह\u093fन\u094dद\u0940 لا \x00\t\n �"


def _begin(
    tokenizer: Tokenizer,
    sampling: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (5, 6),
    index: int = 0,
) -> DetokenizerState:
    request = Request(
        request_id="r", prompt=TextPrompt(text=""), sampling=sampling or SamplingParams(), arrival_s=0.0
    )
    return Detokenizer(tokenizer).begin(
        TokenizedRequest(
            request=request,
            sequence_id=7,
            index=index,
            prompt_token_ids=array("i", prompt),
            max_output_len=1000,
            stop_token_ids=frozenset(),
            seed=0,
        )
    )


def _feed(state: DetokenizerState, token_ids: Sequence[int], *, end: bool = False) -> RequestOutput:
    return state.feed(TokenDelta(7, token_ids, finish_reason=FinishReason.LENGTH if end else None))


def _run(state: DetokenizerState, deltas: Sequence[Sequence[int]]) -> RequestOutput:
    """Feed the deltas, the last one with finish_reason LENGTH, until the sequence ends; merge the outputs."""
    outputs: list[RequestOutput] = []
    for position, token_ids in enumerate(deltas):
        outputs.append(_feed(state, token_ids, end=position == len(deltas) - 1))
        if outputs[-1].finish_reason is not None:
            break
    return merge_all(outputs)


def _text_after_text(tokenizer: FastTokenizer, token_ids: Sequence[int], *, skip: bool) -> str:
    """Return the tokens' text where other text stands before it, so that a leading space is kept."""
    kept = [token_id for token_id in token_ids if not (skip and tokenizer.is_special(token_id))]
    return b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", "replace")


@st.composite
def _chunked(draw: st.DrawFn, token_ids: st.SearchStrategy[int]) -> list[list[int]]:
    return draw(st.lists(st.lists(token_ids, max_size=4), min_size=1, max_size=12))


# --- UTF-8 ---


@pytest.mark.slow
@settings(max_examples=150)
@given(_chunked(st.integers(0, 405)), st.booleans())
def test_byte_level_text_is_that_of_the_whole_output(deltas: list[list[int]], skip: bool) -> None:
    tokenizer = byte_level_bpe()
    output = _run(_begin(tokenizer, SamplingParams(skip_special_tokens=skip)), deltas)
    ids = [token_id for delta in deltas for token_id in delta]
    assert output.text == _text_after_text(tokenizer, ids, skip=skip)


@pytest.mark.slow
@settings(max_examples=150)
@given(_chunked(st.integers(0, 310)), st.booleans(), st.booleans())
def test_sentencepiece_text_is_that_of_the_whole_output(
    deltas: list[list[int]], skip: bool, has_text_before: bool
) -> None:
    tokenizer = sentencepiece_bpe()
    prompt = (1, 270) if has_text_before else (1,)
    output = _run(_begin(tokenizer, SamplingParams(skip_special_tokens=skip), prompt=prompt), deltas)
    ids = [token_id for delta in deltas for token_id in delta]
    assert output.text == (
        _text_after_text(tokenizer, ids, skip=skip)
        if has_text_before
        else tokenizer.decode(ids, skip_special_tokens=skip)
    )


@pytest.mark.parametrize("make_tokenizer", [byte_level_bpe, sentencepiece_bpe])
def test_every_beginning_of_a_text_of_many_scripts_streams_as_the_library_decodes_it(
    make_tokenizer: Callable[[], FastTokenizer],
) -> None:
    tokenizer = make_tokenizer()
    ids = list(tokenizer.encode(_MIXED, add_special_tokens=False))
    whole_characters = tokenizer.decode(ids, skip_special_tokens=True)
    for end in range(1, len(ids) + 1):
        # At its beginning a SentencePiece text loses the space that encoding put there.
        output = _run(_begin(tokenizer, prompt=(1,)), [[token_id] for token_id in ids[:end]])
        assert output.text.rstrip("\ufffd") == whole_characters[: len(output.text.rstrip("\ufffd"))]
        assert output.text == b"".join(map(tokenizer.token_bytes, ids[:end])).decode(
            "utf-8", "replace"
        ).removeprefix(" " if tokenizer.strips_leading_space else "")
    assert whole_characters == _MIXED


def test_no_part_of_a_character_is_told_before_it_is_whole() -> None:
    state = _begin(FakeTokenizer())
    texts = [_feed(state, [value]).text for value in "a😀é".encode()]
    assert texts == ["a", "", "", "", "😀", "", "é"]


def test_an_unfinished_character_becomes_a_replacement_sign_at_the_end() -> None:
    state = _begin(FakeTokenizer())
    first = "é".encode()[0]
    assert _feed(state, [ord("a"), first]).text == "a"
    assert _feed(state, [], end=True).text == "\ufffd"


def test_invalid_bytes_become_replacement_signs_and_the_text_goes_on() -> None:
    output = _run(_begin(FakeTokenizer()), [[0xFF], [ord("a"), 0xC3], [ord("b")]])
    assert output.text == "\ufffda\ufffdb"


def test_a_skipped_special_token_within_a_character_does_not_break_it() -> None:
    first, second = "é".encode()
    output = _run(_begin(FakeTokenizer()), [[first], [EOS_ID], [second]])
    assert output.text == "é"


def test_a_special_token_that_is_kept_does_break_it() -> None:
    first, second = "é".encode()
    state = _begin(FakeTokenizer(), SamplingParams(skip_special_tokens=False))
    assert _run(state, [[first], [EOS_ID], [second]]).text == "\ufffd<eos>\ufffd"


def test_equal_tokens_give_the_same_string_object() -> None:
    """The stream writer keeps a table of encoded texts by object."""
    state = _begin(byte_level_bpe())
    token_id = byte_level_bpe().encode(" one", add_special_tokens=False)[0]
    assert _feed(state, [token_id]).text is _feed(state, (token_id,)).text


def test_ids_outside_the_vocabulary_give_no_text() -> None:
    assert _run(_begin(byte_level_bpe()), [[10_000_000], [ord("a")]]).text.isprintable()
    assert _feed(_begin(byte_level_bpe()), [10_000_000]).text == ""


# --- leading space ---


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_bpe()
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.token_bytes(the[0]) == b" the"
    assert _run(_begin(tokenizer, prompt=(1, *the)), [list(the)]).text == " the"


def test_a_text_after_nothing_but_bos_loses_one_space_only() -> None:
    tokenizer = sentencepiece_bpe()
    the = list(tokenizer.encode("the", add_special_tokens=False))
    assert _run(_begin(tokenizer, prompt=(1,)), [[2], the, the]).text == "the the"


# --- stop strings ---


def _reference(
    pieces: Sequence[str], stops: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, str | None]:
    """Read characters one by one; the first stop string (the longest of several) ends the text."""
    text = ""
    for position, piece in enumerate(pieces):
        for character in piece:
            text += character
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and position + 1 >= min_tokens:
                stop = max(ended, key=len)
                return (text if include else text.removesuffix(stop)), stop
    return text, None


@pytest.mark.slow
@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab ", max_size=3), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_a_reader_of_characters_would(
    pieces: list[str], cuts: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    tokenizer = _PieceTokenizer(pieces)
    sampling = SamplingParams(
        stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=100
    )
    deltas, at = [], 0
    for cut in cuts:
        deltas.append(list(range(at, min(at + cut, len(pieces)))))
        at += cut
        if at >= len(pieces):
            break
    output = _run(_begin(tokenizer, sampling), deltas)
    text, stop = _reference(pieces, stops, min_tokens, include)
    assert output.text == text
    if stop is None:
        assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)
        assert list(output.token_ids) == list(range(len(pieces)))
    else:
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.usage is not None
    assert output.usage.num_output_tokens == len(output.token_ids)


class _PieceTokenizer(FakeTokenizer):
    """Token i is the i-th piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__()
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        return False


def _pieces(*pieces: str, **sampling: object) -> DetokenizerState:
    return _begin(_PieceTokenizer(pieces), SamplingParams(**sampling))  # type: ignore[arg-type]


def test_what_may_begin_a_stop_string_is_held_and_no_more() -> None:
    state = _pieces("abc", "EN", "x", "ab", "cEND", stop="END")
    texts = [_feed(state, [position]).text for position in range(4)]
    assert texts == ["abc", "", "ENx", "ab"]
    last = _feed(state, [4])
    assert (last.text, last.finish_reason, last.stop_reason) == ("c", FinishReason.STOP, "END")


def test_held_text_goes_out_with_the_end() -> None:
    state = _pieces("abcE", "N", stop="END")
    assert _feed(state, [0]).text == "abc"
    assert _feed(state, [1], end=True).text == "EN"


def test_token_ids_and_logprobs_do_not_wait_for_their_text() -> None:
    state = _pieces("E", "N", stop="END")
    logprobs = [TokenLogprobs(0, -1.0, 1, ())]
    output = state.feed(TokenDelta(7, [0], logprobs))
    assert (output.text, output.token_ids, output.logprobs) == ("", [0], logprobs)


def test_tokens_behind_a_stop_string_are_dropped_with_their_logprobs() -> None:
    state = _pieces("a", "STOP", "b", "STOP", stop=("STOP",))
    logprobs = [TokenLogprobs(position, -1.0, 1, ()) for position in range(4)]
    output = state.feed(TokenDelta(7, [0, 1, 2, 3], logprobs, finish_reason=FinishReason.LENGTH))
    assert (output.text, output.token_ids, output.logprobs) == ("a", [0, 1], logprobs[:2])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "STOP")
    assert output.usage == Usage(2, 2, 0)


def test_a_stop_string_may_contain_bytes_of_several_tokens() -> None:
    tokenizer = FakeTokenizer()
    output = _run(_begin(tokenizer, SamplingParams(stop=("😀",))), [[value] for value in "a😀b".encode()])
    assert (output.text, output.stop_reason) == ("a", "😀")


def test_text_before_min_tokens_never_matches_even_later() -> None:
    state = _pieces("STOP", " and ", "STO", "P", stop="STOP", min_tokens=3)
    output = _run(state, [[0], [1], [2], [3]])
    assert (output.text, output.stop_reason) == ("STOP and ", "STOP")


def test_a_stop_string_before_min_tokens_is_not_held_back() -> None:
    state = _pieces("STOP", "x", stop="STOP", min_tokens=3)
    assert [_feed(state, [position]).text for position in range(2)] == ["STOP", "x"]
    longer = _pieces("ab", "x", stop=("ab", "bc"), min_tokens=3)
    assert [_feed(longer, [position]).text for position in range(2)] == ["a", "bx"]


def test_the_replacement_sign_at_the_end_may_complete_a_stop_string() -> None:
    state = _begin(FakeTokenizer(), SamplingParams(stop=("a\ufffd",)))
    output = _feed(state, [ord("b"), ord("a"), 0xC3], end=True)
    assert (output.text, output.finish_reason, output.stop_reason) == ("b", FinishReason.STOP, "a\ufffd")


def test_no_delta_is_taken_after_the_end() -> None:
    for state in (_pieces("STOP", stop="STOP"), _pieces("a")):
        _feed(state, [0], end=True)
        assert state.is_finished
        with pytest.raises(InvariantError):
            _feed(state, [0])


def test_the_same_stop_strings_are_prepared_once_and_sets_are_forgotten_in_turn() -> None:
    detokenizer = Detokenizer(FakeTokenizer())
    for number in range(200):
        state = _begin_with(detokenizer, f"stop{number}")
        text = "a" + "".join(_feed(state, [value]).text for value in f"stop{number}".encode())
        assert (text, state.is_finished) == ("a", True)
    assert len(detokenizer._stop_sets) <= 64


def _begin_with(detokenizer: Detokenizer, stop: str) -> DetokenizerState:
    request = Request(
        request_id="r", prompt=TextPrompt(text=""), sampling=SamplingParams(stop=(stop,)), arrival_s=0.0
    )
    return detokenizer.begin(
        TokenizedRequest(
            request=request,
            sequence_id=7,
            index=0,
            prompt_token_ids=array("i", [1]),
            max_output_len=10,
            stop_token_ids=frozenset(),
            seed=0,
        )
    )


# --- stop tokens, counts, errors ---


def _stop(state: DetokenizerState, token_ids: Sequence[int], stop_token_id: int) -> RequestOutput:
    return state.feed(TokenDelta(7, token_ids, finish_reason=FinishReason.STOP, stop_token_id=stop_token_id))


def test_the_text_of_a_stop_token_is_left_out_but_it_counts() -> None:
    state = _begin(FakeTokenizer(), SamplingParams(stop_token_ids=(300,)))
    output = _stop(state, [ord("a"), 300], 300)
    assert (output.text, output.stop_reason, output.token_ids) == ("a", 300, [ord("a"), 300])
    assert output.usage == Usage(2, 2, 0)


def test_the_text_of_a_stop_token_is_kept_if_stop_strings_are() -> None:
    sampling = SamplingParams(stop_token_ids=(300,), include_stop_str_in_output=True)
    assert _stop(_begin(FakeTokenizer(), sampling), [ord("a"), 300], 300).text == "a w300"


@pytest.mark.parametrize(
    ("sampling", "stop_reason"),
    [
        (SamplingParams(), None),
        (SamplingParams(stop_token_ids=(EOS_ID,)), None),
        (SamplingParams(stop_token_ids=(EOS_ID,), ignore_eos=True), EOS_ID),
    ],
)
def test_eos_is_reported_only_if_it_ends_the_sequence_as_a_stop_token(
    sampling: SamplingParams, stop_reason: int | None
) -> None:
    assert _stop(_begin(FakeTokenizer(), sampling), [EOS_ID], EOS_ID).stop_reason == stop_reason


def test_text_held_for_a_stop_string_goes_out_before_a_stop_token() -> None:
    state = _begin(FakeTokenizer(), SamplingParams(stop=("END",), skip_special_tokens=False))
    assert _feed(state, list(b"aE")).text == "a"
    output = _stop(state, [EOS_ID], EOS_ID)
    assert (output.text, output.finish_reason, output.stop_reason) == ("E", FinishReason.STOP, None)


def test_usage_counts_every_token_and_comes_with_the_end() -> None:
    state = _begin(FakeTokenizer(), prompt=(5, 6, 7), index=2)
    first = state.feed(TokenDelta(7, [97], num_cached_tokens=2))
    assert (first.index, first.usage) == (2, None)
    assert state.usage() == Usage(3, 1, 2)
    last = state.feed(TokenDelta(7, [98, 99], finish_reason=FinishReason.LENGTH, num_cached_tokens=3))
    assert last.usage == Usage(3, 3, 3)


def test_prompt_logprobs_are_passed_on() -> None:
    prompt_logprobs = [TokenLogprobs(6, -1.0, 1, ())]
    assert (
        _begin(FakeTokenizer()).feed(TokenDelta(7, [97], prompt_logprobs=prompt_logprobs)).prompt_logprobs
        is prompt_logprobs
    )


def test_an_error_ends_the_text_with_what_was_held() -> None:
    state = _begin(FakeTokenizer(), SamplingParams(stop=("END",)))
    _feed(state, list(b"E"))
    error = StepFailed("lost", step_id=3)
    output = state.feed(TokenDelta(7, [], finish_reason=FinishReason.ERROR, error=error))
    assert (output.text, output.finish_reason, output.error) == ("E", FinishReason.ERROR, error)
