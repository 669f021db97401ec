"""The process that compiles grammars: started when the first is asked for, killed when one takes too long.

    python -m asyncserve.loop.grammar_worker MEMORY_BYTES

Reads frames from its standard input, writes frames to its standard output (`grammar.py` is the other side):
the vocabulary once, then one grammar after the other. Every one is tried before it is handed over: some
hundred steps along it show whether it allows any text, and whether its masks take a time that a step can
spare. A crash, too much memory or too much time ends this process and harms nobody else.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from asyncserve.grammar import TimeBudget
from asyncserve.loop.json_schema import SchemaRefused, enforceable_schema
from asyncserve.request import StructureKind

TRIED_STEPS = 48
"""Tokens, any that may come, that a new grammar is followed for before it is handed over."""
TRIED_SHORT_STEPS = 400
"""Tokens, the shortest that may come, that it is followed for then: many are what shows a grammar that grows
slow with the text, and of these the most fit into a text of a given length."""
SLOW_STEP_S = 0.1
"""Processor time of one step above which a grammar is refused: all other sequences would wait for it."""
MAX_PACKED_BYTES = 64 * 1024**2
"""Larger compiled grammars are refused: unpacking them takes seconds, and they have to be kept."""
_LEN_BYTES = 8

Words = Any  # a numpy array of int32; numpy is imported when it is first needed
_WORD_BITS = 32


class Refused(Exception):
    """The grammar cannot be used; the message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the worker is told of the vocabulary, besides what each token stands for.

    Args:
        vocab_size: Rows of the model's output matrix.
        stop_token_ids: The tokens that end a text.
        special_ids: Special tokens by their text, for structural tags that name them.
    """

    vocab_size: int
    stop_token_ids: list[int]
    special_ids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be compiled, as it travels to the worker."""

    kind: str
    source: str
    limit_s: float


def write_frame(stream: BinaryIO, *parts: bytes) -> None:
    """Write several byte strings as one message."""
    lengths = b"".join(len(part).to_bytes(_LEN_BYTES, "little") for part in parts)
    stream.write(b"".join((len(parts).to_bytes(_LEN_BYTES, "little"), lengths, *parts)))
    stream.flush()


def read_frame(stream: BinaryIO) -> list[bytes]:
    """Read one message.

    Raises:
        EOFError: There is none any more, or not all of it.
    """
    num_parts = _read_len(stream)
    lengths = [_read_len(stream) for _ in range(num_parts)]
    return [_read(stream, length) for length in lengths]


def _read_len(stream: BinaryIO) -> int:
    return int.from_bytes(_read(stream, _LEN_BYTES), "little")


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


class Worker:
    """Compiles and tries grammars for one vocabulary.

    Args:
        tokens: What it is about.
        texts: Token id → what it stands for.
    """

    def __init__(self, tokens: Tokens, texts: list[bytes]) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=tokens.vocab_size,
            stop_token_ids=tokens.stop_token_ids,
        )
        self._special_ids = tokens.special_ids
        self._all_tokens = _pack_ids(range(tokens.vocab_size), tokens.vocab_size)
        by_length: dict[int, list[int]] = {}
        for token_id in sorted(set(range(len(texts))) - set(tokens.stop_token_ids)):
            by_length.setdefault(len(texts[token_id]), []).append(token_id)
        self._by_length = [
            _pack_ids(by_length[length], tokens.vocab_size) for length in sorted(by_length) if length
        ]
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def packed_vocabulary(self) -> bytes:
        """Return the vocabulary as the library writes it."""
        return str(self._info.serialize_json()).encode()

    def compile(self, kind: StructureKind, source: str) -> bytes:
        """Return the compiled grammar as the library writes it.

        Raises:
            Refused: It cannot be compiled or followed.
        """
        try:
            with _Notices() as notices:
                compiled = self._compile(kind, source)
            if kind is not StructureKind.STRUCTURAL_TAG:
                notices.refuse_any()
            self._try(compiled)
            packed = str(compiled.serialize_json()).encode()
        except (Refused, SchemaRefused, json.JSONDecodeError) as error:
            raise Refused(str(error)) from error
        except Exception as error:  # of a foreign library, for a source that may be anything
            raise Refused(_first_message(error)) from error
        if len(packed) > MAX_PACKED_BYTES:
            raise Refused(f"compiled, it has {len(packed)} bytes; at most {MAX_PACKED_BYTES} are taken")
        return packed

    def _compile(self, kind: StructureKind, source: str) -> Any:
        compiler = self._compiler
        match kind:
            case StructureKind.JSON_OBJECT:
                return compiler.compile_json_schema('{"type": "object"}')
            case StructureKind.JSON_SCHEMA:
                # Strict: an object has the properties its schema declares, and others where it says so. Each
                # such output satisfies the schema, and a model is not led to invent properties.
                return compiler.compile_json_schema(enforceable_schema(source), strict_mode=True)
            case StructureKind.REGEX:
                return compiler.compile_regex(source)
            case StructureKind.CHOICE:
                return compiler.compile_structural_tag(_choice_tag(source))
            case StructureKind.GRAMMAR:
                if "::=" not in source and "start:" in source:
                    return compiler.compile_lark(source)
                return compiler.compile_grammar(source)
            case StructureKind.STRUCTURAL_TAG:
                tag = json.loads(source)
                self._prepare(tag)
                return compiler.compile_structural_tag(json.dumps(tag))

    def _prepare(self, node: Any) -> None:
        """Put ids in place of the texts of special tokens, and see to the schemas within a tag."""
        if isinstance(node, list):
            for each in node:
                self._prepare(each)
        if not isinstance(node, dict):
            return
        for key, value in node.items():
            if key == "token" and isinstance(value, str):
                node[key] = self._special_ids.get(value, value)
            elif key in ("trigger_tokens", "exclude_tokens") and isinstance(value, list):
                node[key] = [
                    self._special_ids.get(each, each) if isinstance(each, str) else each for each in value
                ]
            elif key == "json_schema":
                node[key] = self._inner_schema(value, is_strict=node.get("strict") is True)
            else:
                self._prepare(value)
        if node.get("type") == "json_schema":
            node.pop("strict", None)  # a word of ours

    def _inner_schema(self, schema: Any, *, is_strict: bool) -> Any:
        """Return a schema within a tag in the form to be compiled.

        One that is not strict (the arguments of most tools) is followed as far as can be, and where it cannot
        be followed at all, as if it asked for any object.
        """
        text = enforceable_schema(json.dumps(schema)) if is_strict else json.dumps(schema)
        try:
            with _Notices() as notices:
                self._xgrammar.Grammar.from_json_schema(text)
        except RuntimeError:
            if is_strict:
                raise
            return {"type": "object"}
        if is_strict:
            notices.refuse_any()
        return json.loads(text)

    def _try(self, compiled: Any) -> None:
        """Follow a grammar for a few steps of any length, then, from its beginning, for many short ones.

        Raises:
            Refused: It allows nothing, or a step or all together take too long.
        """
        self._follow(compiled, TRIED_STEPS, [self._all_tokens])
        self._follow(compiled, TRIED_SHORT_STEPS, [*self._by_length, self._all_tokens])

    def _follow(self, compiled: Any, num_steps: int, preferred: Sequence[Words]) -> None:
        """Follow a grammar at random, by tokens of the first of these sets that has one that may come."""
        import numpy as np

        matcher = self._xgrammar.GrammarMatcher(compiled)
        budget = TimeBudget()
        rng = random.Random(0)
        words = np.zeros(-(-self._info.vocab_size // _WORD_BITS), np.int32)
        for step in range(num_steps):
            began_s = time.thread_time()
            if not matcher.fill_next_token_bitmask(words):  # every token may come, and it wrote nothing
                words.fill(-1)
            took_s = time.thread_time() - began_s
            budget.note(took_s)
            some = next((own for own in (words & each for each in preferred) if own.any()), None)
            if some is None:  # it may have set some beyond the vocabulary
                if step == 0:
                    raise Refused("it allows no text that this model's tokens can spell")
                raise Refused("it leads to a place from which no text can go on")
            allowed = np.flatnonzero(np.unpackbits(some.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(allowed))
            began_s = time.thread_time()
            if not matcher.accept_token(token_id):
                raise Refused("it cannot be followed: a token it allows is not accepted")
            accept_s = time.thread_time() - began_s
            budget.note(accept_s)
            if took_s + accept_s > SLOW_STEP_S or budget.is_spent:
                raise Refused("it takes too long to follow; make it less ambiguous")
            if matcher.is_terminated():
                return


def _pack_ids(token_ids: Iterable[int], vocab_size: int) -> Words:
    """Return the mask words that allow these tokens."""
    import numpy as np

    is_allowed = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, np.bool_)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view(np.int32)


class _Notices:
    """What a library writes to the process's standard error meanwhile, past Python."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> "_Notices":
        sys.stderr.flush()
        self._saved = os.dup(2)
        self._file = os.memfd_create("notices") if hasattr(os, "memfd_create") else _temporary_file()
        os.dup2(self._file, 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._saved, 2)
        os.close(self._saved)
        os.lseek(self._file, 0, os.SEEK_SET)
        text = os.read(self._file, 64 * 1024).decode("utf-8", "replace")
        os.close(self._file)
        self.lines = [line for line in text.splitlines() if "arning" in line]

    def refuse_any(self) -> None:
        """Refuse a grammar of which the library said in passing what it does not enforce.

        Raises:
            Refused: It did: "ignoring …", "falling back to …".
        """
        if self.lines:
            raise Refused(_without_place(self.lines[0]))


def _temporary_file() -> int:
    import tempfile

    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


def _choice_tag(source: str) -> str:
    choices: Sequence[str] = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise Refused("choice must be a list of one or more strings")
    elements = [{"type": "const_string", "value": each} for each in choices]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": elements}})


def _first_message(error: Exception) -> str:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return "it takes too much memory"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return _without_place(lines[-1] if lines else type(error).__name__)


def _without_place(line: str) -> str:
    """Take off a message the time, the library's source file, and what the library does about it."""
    head, _, rest = line.partition(": ")
    text = (rest if head.startswith("[") and rest else line).partition("; ignoring")[0]
    return text.removeprefix("Warning: ").removeprefix("Check failed: ").strip()[:500]


def _limit_memory(more_bytes: int) -> None:
    """Let allocations fail above what the process has now and `more_bytes`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now_bytes = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + more_bytes, now_bytes + more_bytes))


def main(memory_bytes: int, requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve until the other side closes."""
    tokens, *texts = read_frame(requests)
    worker = Worker(Tokens(**json.loads(tokens)), texts)
    with contextlib.suppress(OSError, ValueError, IndexError):  # elsewhere the time limit is all there is
        _limit_memory(memory_bytes)
    write_frame(answers, worker.packed_vocabulary())
    while True:
        try:
            (data,) = read_frame(requests)
        except EOFError:
            return
        job = Job(**json.loads(data))
        # Should the server die meanwhile: nobody else would end a compilation that never ends.
        signal.setitimer(signal.ITIMER_REAL, 2 * job.limit_s + 10)
        try:
            answer = (b"compiled", worker.compile(StructureKind(job.kind), job.source))
        except Refused as error:
            answer = (b"refused", str(error).encode("utf-8", "replace"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, *answer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # Whatever prints must not get between the frames.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(int(sys.argv[1]), sys.stdin.buffer, output)
