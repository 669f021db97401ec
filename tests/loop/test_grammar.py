import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from asyncserve.errors import EngineError, EngineStopped
from asyncserve.loop.grammar import MAX_SPACE_TOKENS, CompiledGrammar, Vocabulary, XGrammarCompiler
from asyncserve.loop.grammar_cache import GrammarRefused, NobodyWaits
from asyncserve.loop.grammar_worker import Refused, Worker
from asyncserve.request import StructuredOutput, StructureKind
from tests.fakes.small_tokenizers import byte_level_bpe, sentencepiece_bpe
from tests.fakes.tokenizer import FakeTokenizer
from tests.loop.grammars import Compiler, schema, write_at_random
from tests.loop.schema_corpus import SCHEMAS

# Importing xgrammar takes a second, for each worker another: on a busy machine much longer.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def structure(kind: StructureKind, source: object = "") -> StructuredOutput:
    return StructuredOutput(kind=kind, source=source if isinstance(source, str) else json.dumps(source))


def tag(content: object) -> StructuredOutput:
    return structure(StructureKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": content})


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_level_bpe())


def outputs(compiler: Compiler, structured: StructuredOutput, num_outputs: int = 20) -> list[str]:
    """Texts that were written to their end; at least one must be."""
    grammar = compiler.compile(structured)
    written = [write_at_random(grammar, byte_level_bpe(), seed) for seed in range(num_outputs)]
    ended = [text for text, has_ended in written if has_ended]
    assert ended
    return ended


# ---- JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_of_a_schema_satisfies_it(compiler: Compiler, name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for text in outputs(compiler, schema(SCHEMAS[name])):
        validator.validate(json.loads(text))


def test_a_json_object_is_an_object_and_not_another_value(compiler: Compiler) -> None:
    values = [json.loads(text) for text in outputs(compiler, structure(StructureKind.JSON_OBJECT), 40)]
    assert all(isinstance(value, dict) for value in values)
    assert any(values)


def test_an_object_has_no_properties_that_its_schema_does_not_speak_of(compiler: Compiler) -> None:
    declared = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert {key for text in outputs(compiler, schema(declared)) for key in json.loads(text)} == {"a"}
    opened = {**declared, "additionalProperties": True}
    assert len({key for text in outputs(compiler, schema(opened)) for key in json.loads(text)}) > 1


def test_white_space_does_not_go_on_for_ever(compiler: Compiler) -> None:
    tokenizer = byte_level_bpe()
    matcher = compiler.compile(structure(StructureKind.JSON_OBJECT)).matcher()
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    words = memoryview(bytearray(4 * -(-tokenizer.vocab_size // 32))).cast("i")

    def may_come(token_id: int) -> bool:
        matcher.fill_mask(words)
        return bool(words[token_id // 32] >> token_id % 32 & 1)

    assert matcher.accept(brace)
    for _ in range(MAX_SPACE_TOKENS):
        assert may_come(space)
        assert matcher.accept(space)
    assert not may_come(space)
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    assert may_come(quote)
    assert matcher.accept(quote)
    assert may_come(space)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "the keyword uniqueItems is not supported"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf is not supported for type:number"),
        ({"type": "integer", "multipleOf": 7, "minimum": 3}, "range \\+ multipleOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf with overlapping"),
        ({"type": "string", "pattern": "^(?!a).*$"}, "[Ll]ookahead"),
        ({"type": "string", "pattern": "\\p{L}"}, "position 1"),
        ({"type": "strnig"}, 'Unsupported type "strnig"'),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater than maximum"),
        ({"$ref": "#"}, "Circular"),
        ({"$ref": "#/$defs/none"}, "Cannot find field"),
        (False, "cannot accept any value"),
        ("{", "the schema is no JSON"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    compiler: Compiler, source: Any, message: str
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        compiler.compile(structure(StructureKind.JSON_SCHEMA, source))
    assert "/project/" not in str(caught.value)


def test_a_grammar_is_taken_to_be_no_smaller_than_what_it_is_packed_into(compiler: Compiler) -> None:
    strings = {name: {"type": "string"} for name in "abcde"}
    objects = {f"o{number}": {"type": "object", "properties": strings} for number in range(12)}
    structured = schema({"type": "object", "properties": objects})
    packed = compiler.worker.compile(structured.kind, structured.source)
    assert compiler.vocabulary.unpack(packed, structured).num_bytes >= len(packed)


# ---- the other kinds -----------------------------------------------------------------------------------


def test_a_regular_expression_is_matched_from_end_to_end(compiler: Compiler) -> None:
    pattern = r"(\+[0-9]{2} )?[1-9][0-9]{2,4}/(a|bc)+"
    for text in outputs(compiler, structure(StructureKind.REGEX, pattern)):
        assert re.fullmatch(pattern, text)


def test_every_choice_can_be_had_and_nothing_else(compiler: Compiler) -> None:
    choices = ["yes", "no", "yesterday", 'q"\\\n', "日本", " leading"]
    assert set(outputs(compiler, structure(StructureKind.CHOICE, choices), 120)) == set(choices)


def test_a_grammar_with_a_single_text_yields_it(compiler: Compiler) -> None:
    for source in ('root ::= "the only " answer\nanswer ::= "answer"', 'start: "the only answer"'):
        assert set(outputs(compiler, structure(StructureKind.GRAMMAR, source), 3)) == {"the only answer"}


def test_an_ebnf_grammar_is_followed(compiler: Compiler) -> None:
    source = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9] | "(" sum ")"'
    for text in outputs(compiler, structure(StructureKind.GRAMMAR, source)):
        assert re.fullmatch(r"[0-9+()]+", text)
        assert isinstance(eval(text), int)


def test_a_structural_tag_frames_its_content(compiler: Compiler) -> None:
    call = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    content = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": call},
        "end": "</call>",
    }
    for text in outputs(compiler, tag(content)):
        found = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
        assert found
        assert json.loads(found[1])["x"] in (1, 2)


def test_a_structural_tag_may_name_special_tokens_by_their_text(compiler: Compiler) -> None:
    tokenizer = byte_level_bpe()
    elements = [{"type": "token", "token": "<|begin|>"}, {"type": "const_string", "value": "x"}]
    matcher = compiler.compile(tag({"type": "sequence", "elements": elements})).matcher()
    assert not matcher.accept(tokenizer.encode("<", add_special_tokens=False)[0])
    assert matcher.accept(0)
    assert matcher.accept(tokenizer.encode("x", add_special_tokens=False)[0])
    assert matcher.accept(1)


def test_schemas_within_a_tag_are_followed_as_far_as_can_be_unless_they_are_strict(
    compiler: Compiler,
) -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    for text in outputs(compiler, tag({"type": "json_schema", "json_schema": unique})):
        assert len(json.loads(text)) == 2
    hopeless = {"type": "string", "pattern": "\\p{L}"}
    for text in outputs(compiler, tag({"type": "json_schema", "json_schema": hopeless})):
        assert isinstance(json.loads(text), dict)
    with pytest.raises(Refused, match="uniqueItems"):
        compiler.compile(tag({"type": "json_schema", "json_schema": unique, "strict": True}))
    with pytest.raises(Refused, match="position 1"):
        compiler.compile(tag({"type": "json_schema", "json_schema": hopeless, "strict": True}))
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(Refused, match="oneOf"):
        compiler.compile(tag({"type": "json_schema", "json_schema": overlapping, "strict": True}))


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (StructureKind.REGEX, "(a", "[Rr]egex"),
        (StructureKind.REGEX, "a(?=b)", "Lookahead"),
        (StructureKind.GRAMMAR, "root ::= foo", 'Rule "foo" is not defined'),
        (StructureKind.GRAMMAR, 'root ::= "a', "string literal"),
        (StructureKind.GRAMMAR, "nonsense", "EBNF"),
        (StructureKind.GRAMMAR, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "[Nn]est"),
        (StructureKind.CHOICE, "[]", "one or more strings"),
        (StructureKind.CHOICE, "[1]", "one or more strings"),
        (StructureKind.CHOICE, "yes", "Expecting value"),
        (StructureKind.STRUCTURAL_TAG, "{", "Expecting"),
        (StructureKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "x"}}', "[Ff]ormat"),
        (StructureKind.STRUCTURAL_TAG, "[" * 100_000, "nested"),
    ],
)
def test_bad_sources_are_refused_with_the_reason(
    compiler: Compiler, kind: StructureKind, source: str, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        compiler.compile(structure(kind, source))


class SlowMatchers:
    """Instead of xgrammar's module: matchers whose masks take ever longer, by a clock of their own."""

    def __init__(self, library: Any, more_s: float) -> None:
        self._library = library
        self._more_s = more_s
        self.now_s = 0.0

    def GrammarMatcher(self, compiled: Any) -> Any:
        clock = self
        matcher = self._library.GrammarMatcher(compiled)

        class Slower:
            num_masks = 0

            def fill_next_token_bitmask(self, words: Any) -> bool:
                self.num_masks += 1
                clock.now_s += self.num_masks * clock._more_s
                return bool(matcher.fill_next_token_bitmask(words))

            def __getattr__(self, name: str) -> Any:
                return getattr(matcher, name)

        return Slower()


@pytest.mark.parametrize(("more_s", "is_refused"), [(0.000005, False), (0.00003, True)])
def test_a_grammar_that_grows_slow_far_along_is_refused(
    monkeypatch: pytest.MonkeyPatch, more_s: float, is_refused: bool
) -> None:
    vocabulary = Vocabulary(byte_level_bpe(), byte_level_bpe().vocab_size)
    worker = Worker(vocabulary.tokens, vocabulary.texts)
    matchers = SlowMatchers(worker._xgrammar, more_s)
    worker._xgrammar = matchers  # type: ignore[assignment]
    monkeypatch.setattr("time.thread_time", lambda: matchers.now_s)
    with pytest.raises(Refused, match="too long to follow") if is_refused else contextlib.nullcontext():
        worker.compile(StructureKind.REGEX, "[a-z]{1000}")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
@pytest.mark.parametrize("where", ["compile", "follow", "pack"])
def test_too_little_memory_is_a_refusal_wherever_it_is_noticed(error: Exception, where: str) -> None:
    class Packed:
        def serialize_json(self) -> str:
            raise error

    class Full(Worker):
        def _compile(self, kind: StructureKind, source: str) -> Any:
            if where == "compile":
                raise error
            return Packed()

        def _try(self, compiled: Any) -> None:
            if where == "follow":
                raise error

    vocabulary = Vocabulary(byte_level_bpe(), byte_level_bpe().vocab_size)
    with pytest.raises(Refused, match="takes too much memory"):
        Full(vocabulary.tokens, vocabulary.texts).compile(StructureKind.REGEX, "a")


def test_what_no_token_can_spell_is_refused() -> None:
    class NoDigits(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"" if token_id in range(0x30, 0x3A) else super().token_bytes(token_id)

    compiler = Compiler(NoDigits(vocab_size=260))
    with pytest.raises(Refused, match="no text that this model's tokens can spell"):
        compiler.compile(structure(StructureKind.REGEX, "[0-9]+"))
    with pytest.raises(Refused, match="no text can go on"):
        compiler.compile(structure(StructureKind.REGEX, "a[0-9]+"))


def test_outputs_of_a_sentencepiece_model_are_followed_as_bytes() -> None:
    tokenizer = sentencepiece_bpe()
    grammar = Compiler(tokenizer).compile(structure(StructureKind.CHOICE, ["the aé", "on"]))
    assert {write_at_random(grammar, tokenizer, seed)[0] for seed in range(20)} == {"the aé", "on"}


# ---- the worker process --------------------------------------------------------------------------------

ENDLESS = structure(
    StructureKind.REGEX, "(" + "|".join(f"[a-z]{{1,{i}}}[0-9]{{1,{i}}}" for i in range(2, 800)) + "){1,100}"
)
"""Compiles for minutes, and has been ended long before."""
YES = structure(StructureKind.CHOICE, ["yes"])


@pytest.fixture
def process() -> Iterator[XGrammarCompiler]:
    tokenizer = byte_level_bpe()
    compiler = XGrammarCompiler(tokenizer, tokenizer.vocab_size, timeout_s=30)
    yield compiler
    compiler.close()


def written(compiler: XGrammarCompiler, structured: StructuredOutput) -> str:
    return write_at_random(compiler.compile(structured), byte_level_bpe(), 0)[0]


def test_one_process_compiles_all_structures_and_ends_with_the_compiler(process: XGrammarCompiler) -> None:
    assert process.worker_pid is None
    assert written(process, YES) == "yes"
    pid = process.worker_pid
    assert pid is not None
    with pytest.raises(GrammarRefused, match="the keyword not is not supported"):
        process.compile(schema({"not": {}}))
    assert json.loads(written(process, schema({"const": [1, 2]}))) == [1, 2]
    assert process.worker_pid == pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineStopped):
        process.compile(YES)


def test_what_takes_too_long_is_refused_and_harms_nothing_that_comes_after() -> None:
    tokenizer = byte_level_bpe()
    compiler = XGrammarCompiler(tokenizer, tokenizer.vocab_size, timeout_s=5)
    try:
        assert written(compiler, YES) == "yes"
        pid = compiler.worker_pid
        with pytest.raises(GrammarRefused, match="takes longer than 5 s"):
            compiler.compile(ENDLESS)
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert written(compiler, YES) == "yes"
    finally:
        compiler.close()


def test_a_worker_that_is_ended_by_somebody_else_costs_nobody_an_answer(process: XGrammarCompiler) -> None:
    assert written(process, YES) == "yes"
    pid = process.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that it is in the middle of it when it ends
    outcomes: list[CompiledGrammar] = []
    begun = threading.Event()

    def is_wanted() -> bool:  # asked as soon as it has taken a while
        begun.set()
        return True

    thread = threading.Thread(target=lambda: outcomes.append(process.compile(YES, is_wanted)))
    thread.start()
    assert begun.wait(120)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert len(outcomes) == 1
    assert process.worker_pid != pid


def test_an_idle_worker_that_is_ended_leaves_no_process_behind(process: XGrammarCompiler) -> None:
    assert written(process, YES) == "yes"
    pid = process.worker_pid
    assert pid is not None
    (reaper,) = [thread for thread in threading.enumerate() if thread.name == "reap-grammar-worker"]
    os.kill(pid, signal.SIGKILL)
    reaper.join(60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert written(process, YES) == "yes"


def test_a_compilation_is_ended_when_nobody_waits_for_it(process: XGrammarCompiler) -> None:
    assert written(process, YES) == "yes"
    with pytest.raises(NobodyWaits):
        process.compile(ENDLESS, lambda: False)
    assert process.worker_pid is None
    assert written(process, YES) == "yes"


def test_a_worker_that_dies_fails_what_it_compiles_and_is_replaced(process: XGrammarCompiler) -> None:
    outcomes: list[BaseException] = []

    def compile_endlessly() -> None:
        try:
            process.compile(ENDLESS)
        except (GrammarRefused, EngineError) as error:
            outcomes.append(error)

    thread = threading.Thread(target=compile_endlessly)
    thread.start()
    while thread.is_alive():
        # Whichever it has just started: it may come before the structure does.
        if (pid := process.worker_pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has been replaced since
                os.kill(pid, signal.SIGKILL)
        thread.join(0.05)
    assert len(outcomes) == 1
    assert written(process, YES) == "yes"


def test_closing_ends_a_compilation(process: XGrammarCompiler) -> None:
    assert written(process, YES) == "yes"
    outcomes: list[BaseException] = []

    def compile_endlessly() -> None:
        try:
            process.compile(ENDLESS)
        except EngineStopped as error:
            outcomes.append(error)

    thread = threading.Thread(target=compile_endlessly)
    thread.start()
    process.close()
    thread.join()
    assert len(outcomes) == 1


def test_a_vocabulary_that_cannot_be_had_is_nobodys_fault_and_leaves_no_worker() -> None:
    class Broken(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            raise RuntimeError("no such token")

    compiler = XGrammarCompiler(Broken(), 512, timeout_s=30)
    for _ in range(2):
        with pytest.raises(EngineError, match="no such token"):
            compiler.compile(YES)
        assert compiler.worker_pid is None


def test_a_model_without_an_end_of_answers_has_no_structured_output() -> None:
    class Endless(FakeTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.eos_token_ids = frozenset({100_000})

    compiler = XGrammarCompiler(Endless(), 512, timeout_s=30)
    with pytest.raises(GrammarRefused, match="no token that ends an answer"):
        compiler.compile(YES)
    assert compiler.worker_pid is None
