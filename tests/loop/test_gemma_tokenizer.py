"""Gemma's tokenizer, as its GGUF file gives it, against SentencePiece itself with the same pieces."""

import random
from array import array

import pytest

from asyncserve.checkpoint import open_checkpoint
from asyncserve.gguf_file import read_gguf_header
from asyncserve.loop.detokenizer import Detokenizer
from asyncserve.loop.tokenizer import Tokenizer, load_tokenizer
from asyncserve.request import (
    FinishReason,
    Request,
    SamplingParams,
    TextPrompt,
    TokenDelta,
    TokenizedRequest,
)
from tests.fakes.gemma_model import gemma_model_path

pytestmark = [
    pytest.mark.slow,
    # SWIG's own types, in sentencepiece and older protobuf code.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]

BOS, EOS, END_OF_TURN = 2, 1, 106
TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "a  5",
    "     five",
    " " * 40,
    "x" + " " * 31 + "y" + " " * 33 + "z",
    "\n" * 40 + "a\n\n\n  b\t\tc" + "\t" * 35,
    "def f(x):\n    return x**2  # comment\n\n\n",
    "\r\n\r\n a",
    "1234567890 3.14159 1,000,000",
    "日本語のテキスト 中文测试 한국어 \uff41\uff42\uff43\u3000全角",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 e\u0301 ñ ﬁ ﷺ ⅷ ½ ™",
    "\x00\x01\x7f \u200b\u200d\ufeff \U000e0041 \U0010ffff \u00a0\u2003",
    "<table><tr><td> x </td></tr></table> [multimodal] x",
    "http://example.com/?q=a&b=c#d",
]
PARTS = [
    *"abcdehiot ABC 0123   \n\t.,;:<>/'\"éüß日本語中한👍🏽\u0301",
    "  ",
    "   ",
    "the ",
    "ing ",
    "<td>",
    "\n\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(gemma_model_path())), chat_template=None)


def test_token_ids_are_those_of_sentencepiece(tokenizer: Tokenizer) -> None:
    # Here, because SWIG's types warn when they are imported, which the mark above lets pass.
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    metadata = read_gguf_header(gemma_model_path()).metadata
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    ):
        # The file has real spaces in the tokens that are runs of them.
        model.pieces.add(piece=token.replace(" ", "▁") if kind == 4 else token, score=score, type=kind)
    model.pieces[3].type = 2  # <unk>, which the file calls a control token
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, EOS, BOS, 3
    normalizer.name, normalizer.escape_whitespaces = "identity", True
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    draw = random.Random(1)
    drawn = ["".join(draw.choice(PARTS) for _ in range(draw.randrange(1, 40))) for _ in range(1000)]
    for text in TEXTS + drawn:
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == reference.encode(text), text


def test_a_text_comes_back_as_it_was_and_is_begun_with_bos(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True).tolist()
        assert ids == [BOS, *tokenizer.encode(text, add_special_tokens=False)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>" + text


def test_special_tokens_in_a_text_are_found_and_end_an_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>\n<eos>", add_special_tokens=False)
    assert ids.tolist() == [105, 2364, 107, 10979, END_OF_TURN, 107, EOS]
    assert tokenizer.eos_token_ids == {EOS, END_OF_TURN}
    assert tokenizer.vocab_size == 262144
    assert tokenizer.chat_template_text is None
    assert not tokenizer.strips_leading_space
    # Runs of spaces and lines are tokens of their own, and no special ones.
    assert not any(tokenizer.is_special(token_id) for token_id in (107, 138, 168))


def test_token_by_token_a_stream_is_the_text_of_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(2)
    # Any tokens, with bytes (238 … 493) that make characters or none, then texts as they are encoded.
    answers = [
        [draw.choice((draw.randrange(262144), draw.randrange(238, 494))) for _ in range(60)]
        for _ in range(20)
    ]
    answers += [tokenizer.encode(text, add_special_tokens=False).tolist() for text in TEXTS[2:]]
    for token_ids in answers:
        request = Request(
            request_id="r", prompt=TextPrompt(text=""), sampling=SamplingParams(), arrival_s=0.0
        )
        state = Detokenizer(tokenizer).begin(
            TokenizedRequest(
                request=request,
                sequence_id=0,
                index=0,
                prompt_token_ids=array("i", [BOS]),
                max_output_len=1000,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
        text = ""
        for position, token_id in enumerate(token_ids):
            is_last = position == len(token_ids) - 1
            delta = TokenDelta(0, [token_id], finish_reason=FinishReason.LENGTH if is_last else None)
            text += state.feed(delta).text
        assert text == tokenizer.decode(token_ids, skip_special_tokens=True)
