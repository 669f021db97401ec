"""Compiling the shape that an output must have: `StructuredOutput` → `Grammar`, by xgrammar.

Takes the tokenizer's vocabulary once, then one structure after the other. The work is done in a process of
its own (`grammar_worker`), started when the first structure comes: compiling can take minutes and gigabytes,
and cannot be interrupted in a thread (docs/decisions/0005). What comes back is unpacked here, which takes
milliseconds and no lock on the interpreter. Knows no request; what is kept and who waits is
`grammar_cache`'s.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from asyncserve.errors import EngineError, EngineStopped
from asyncserve.grammar import GrammarMatcher, TimeBudget
from asyncserve.loop.grammar_cache import GrammarRefused, NobodyWaits, WorkerDied
from asyncserve.loop.grammar_worker import Job, Tokens, read_frame, write_frame
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import StructuredOutput, StructureKind

STARTUP_S = 120.0
"""How long the worker may take to start: it imports a good deal, maybe on a busy machine."""
WORTH_ENDING_S = 1.0
"""A compilation that nobody waits for is ended after this time: before, a new worker would take longer."""
LOOK_S = 0.1
"""How often it is looked whether somebody waits."""
MEMORY_BYTES = 2 * 1024**3
"""Memory that compiling may take, besides what the worker has when it is ready."""
MAX_SPACE_TOKENS = 8
"""Tokens of nothing but white space in a row after which JSON goes on, if it can: small models would not."""

_WORD_BITS = 32
_WHITE_SPACE = b" \t\r\n"
_CONTROL = bytes(range(0x20))
_SPECIAL_MARK = b"\xff"
"""Begins no text: so a special token stands for nothing that a grammar of characters allows."""
_WRONG_SECOND_BYTES = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""First byte of a character in UTF-8 → continuation bytes that may not follow it."""

Words = Any  # a numpy array of int32; numpy is imported when it is first needed


class CompiledGrammar:
    """A `Grammar` of xgrammar.

    Args:
        make_matcher: Gives xgrammar's matcher, at the beginning.
        vocabulary: What the grammar was compiled for.
        structured: Where it comes from.
        num_bytes: What it takes in memory, about.
    """

    def __init__(
        self,
        make_matcher: Callable[[], Any],
        vocabulary: "Vocabulary",
        structured: StructuredOutput,
        *,
        num_bytes: int,
    ) -> None:
        self._make_matcher = make_matcher
        self._vocabulary = vocabulary
        self._limits_space = structured.kind in (StructureKind.JSON_OBJECT, StructureKind.JSON_SCHEMA)
        self._permitted = vocabulary.words_permitted(structured)
        self.num_bytes = num_bytes
        self.stop_token_ids = vocabulary.stop_token_ids
        self.time_budget = TimeBudget()

    def matcher(self) -> GrammarMatcher:
        """See `Grammar`."""
        return _Matcher(
            self._make_matcher(), self._permitted, self._vocabulary, limits_space=self._limits_space
        )


class _Matcher:
    """A `GrammarMatcher` of xgrammar.

    Args:
        matcher: xgrammar's.
        permitted: Tokens that may come at all.
        vocabulary: What it is for.
        limits_space: Whether runs of white space are cut short.
    """

    __slots__ = (
        "_array",
        "_limits_space",
        "_matcher",
        "_num_space_tokens",
        "_permitted",
        "_vocabulary",
        "_words_next",
    )

    def __init__(
        self, matcher: Any, permitted: Words, vocabulary: "Vocabulary", *, limits_space: bool
    ) -> None:
        import numpy as np

        self._array = np.frombuffer
        self._matcher = matcher
        self._permitted = permitted
        self._vocabulary = vocabulary
        self._limits_space = limits_space
        self._num_space_tokens = 0
        self._words_next: Words | None = None

    @property
    def is_done(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See `GrammarMatcher`."""
        is_accepted = bool(self._matcher.accept_token(token_id))
        if is_accepted:
            is_space = token_id in self._vocabulary.space_token_ids
            self._num_space_tokens = self._num_space_tokens + 1 if is_space else 0
            self._words_next = self._vocabulary.words_after.get(token_id)
        return is_accepted

    def fill_mask(self, words: memoryview) -> None:
        """See `GrammarMatcher`."""
        row = self._array(words, "int32")
        if self._matcher.is_terminated():
            row.fill(0)
            return
        # It leaves the words as they are where it allows every token, and says so.
        if not self._matcher.fill_next_token_bitmask(row):
            row.fill(-1)
        row &= self._permitted
        if self._words_next is not None:
            row &= self._words_next
        if self._limits_space and self._num_space_tokens >= MAX_SPACE_TOKENS:
            others = row & self._vocabulary.words_without_space
            if others.any():
                row[:] = others


class Vocabulary:
    """The model's tokens as grammars see them. Made when the first is asked for: it takes 0.1 s.

    Args:
        tokenizer: The model's.
        vocab_size: Rows of the model's output matrix, hence columns of the masks.

    Attributes:
        texts: Token id → what it stands for in a grammar.
        tokens: What else the worker must know.
        stop_token_ids: The tokens that end a text.
        space_token_ids: Tokens of nothing but white space.
        words_without_space: Mask words that allow all but these.
        words_after: Token → mask words of those that may follow, where that matters.
        num_mask_bytes: Of the words of one mask.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.stop_token_ids = usable_stop_ids(tokenizer, vocab_size)
        special_ids: dict[str, int] = {}
        self.space_token_ids: set[int] = set()
        self._control_ids: list[int] = []
        self._tab_ids: list[int] = []
        self.texts: list[bytes] = []
        for token_id in range(min(tokenizer.vocab_size, vocab_size)):
            text = tokenizer.token_bytes(token_id)
            if tokenizer.is_special(token_id) or token_id in self.stop_token_ids:
                special_ids[text.decode("utf-8", "replace")] = token_id
                text = _SPECIAL_MARK + text
            elif text and not text.strip(_WHITE_SPACE):
                self.space_token_ids.add(token_id)
            if b"\t" in text:
                self._tab_ids.append(token_id)
            if text.translate(None, b"\t\r\n") != text.translate(None, _CONTROL):
                self._control_ids.append(token_id)
            self.texts.append(text)
        self.words_without_space = self._words_without(self.space_token_ids)
        self.words_after = self._find_words_after(self.texts)
        self.num_mask_bytes = int(self.words_without_space.nbytes)
        self.tokens = Tokens(vocab_size, sorted(self.stop_token_ids), special_ids)
        self._info: Any = None

    def take(self, packed: bytes) -> None:
        """Take the vocabulary as the worker packed it; grammars can be unpacked from then on.

        Unpacking it holds up no other thread, as making it here would for 0.1 s.
        """
        import xgrammar

        if self._info is None:
            self._info = xgrammar.TokenizerInfo.deserialize_json(packed.decode())

    def unpack(self, packed: bytes, structured: StructuredOutput) -> CompiledGrammar:
        """Return a compiled grammar from what the worker sent."""
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(packed.decode(), self._info)
        # The library's own figure leaves out most of what objects take: a twentieth of it in some schemas.
        num_bytes = max(int(compiled.memory_size_bytes), len(packed))
        num_bytes += sys.getsizeof(structured.source) + self.num_mask_bytes
        return CompiledGrammar(
            lambda: xgrammar.GrammarMatcher(compiled), self, structured, num_bytes=num_bytes
        )

    def _find_words_after(self, texts: Sequence[bytes]) -> dict[int, Words]:
        """Return token → mask words of those that may follow, for tokens that end within a character.

        xgrammar lets UTF-8 of no character (overlong, a surrogate) into [^…]; it would turn into U+FFFD.
        """
        words = {
            lead: self._words_without(
                token_id for token_id, text in enumerate(texts) if text and low <= text[0] <= high
            )
            for lead, (low, high) in _WRONG_SECOND_BYTES.items()
        }
        return {
            token_id: words[text[-1]] for token_id, text in enumerate(texts) if text and text[-1] in words
        }

    def words_permitted(self, structured: StructuredOutput) -> Words:
        """Return the mask words of the tokens that outputs of a structure may hold at all.

        No control character may stand in JSON, but xgrammar lets them into strings whose length is limited,
        a line's end excepted. Tabs could stand between JSON's tokens; nobody misses them there.
        """
        match structured.kind:
            case StructureKind.JSON_OBJECT | StructureKind.JSON_SCHEMA:
                return self._words_without([*self._control_ids, *self._tab_ids])
            case StructureKind.STRUCTURAL_TAG if "Length" in structured.source:
                return self._words_without([*self._control_ids, *self._tab_ids])
            case StructureKind.STRUCTURAL_TAG:
                return self._words_without(self._control_ids)
            case _:
                return self._words_without(())

    def _words_without(self, token_ids: Iterable[int]) -> Words:
        import numpy as np

        is_kept = np.zeros(-(-self._vocab_size // _WORD_BITS) * _WORD_BITS, np.bool_)
        is_kept[: self._vocab_size] = True
        is_kept[list(token_ids)] = False
        return np.packbits(is_kept, bitorder="little").view(np.int32)


def import_library() -> None:
    """Import xgrammar, if it is there.

    Best done before there is anything to hold up: for 0.1 s no other thread gets the interpreter.
    """
    with contextlib.suppress(ImportError):
        import xgrammar  # noqa: F401


def usable_stop_ids(tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Return the EOS ids that the model can generate."""
    return frozenset(token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size)


class XGrammarCompiler:
    """Compiles structures in a worker process. `compile` is called by one thread at a time, `close` by any.

    Args:
        tokenizer: The model's.
        vocab_size: Rows of the model's output matrix.
        timeout_s: Seconds one structure may take.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._vocabulary: Vocabulary | None = None
        self._worker: _WorkerProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def compile(
        self, structured: StructuredOutput, is_wanted: Callable[[], bool] = lambda: True
    ) -> CompiledGrammar:
        """Return the compiled structure; blocks. See `GrammarCompiler`.

        Raises:
            GrammarRefused: It cannot be compiled, or takes too long or too much memory.
            NobodyWaits: It took a while, and nobody wanted it any more.
            EngineError: The worker cannot be started.
            EngineStopped: `close` was called.
        """
        if not usable_stop_ids(self._tokenizer, self._vocab_size):
            raise GrammarRefused("this model has no token that ends an answer")
        job = Job(structured.kind.value, structured.source, self._timeout_s)
        try:
            status, content = self._ask(job, is_wanted)
        except EOFError:
            # Somebody else may have ended it. If it was this structure, it ends the next one as well.
            try:
                status, content = self._ask(job, is_wanted)
            except EOFError as error:
                raise WorkerDied(
                    "compiling it takes too much memory, or is more than the compiler can do"
                ) from error
        if status != b"compiled":
            raise GrammarRefused(content.decode("utf-8", "replace"))
        assert self._vocabulary is not None
        return self._vocabulary.unpack(content, structured)

    def _ask(self, job: Job, is_wanted: Callable[[], bool]) -> list[bytes]:
        """Have the worker do a job.

        Raises:
            EOFError: It died meanwhile.
        """
        worker = self._running_worker()
        try:
            return worker.ask([json.dumps(asdict(job)).encode()], job.limit_s, is_wanted)
        except TimeoutError as error:
            self._end_worker()
            raise GrammarRefused(f"compiling it takes longer than {job.limit_s:g} s") from error
        except NobodyWaits:
            self._end_worker()
            raise
        except EOFError as error:
            self._end_worker()
            if self._is_closed:
                raise EngineStopped("the engine was stopped") from error
            raise

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, while there is one."""
        worker = self._worker
        return None if worker is None else worker.pid

    def close(self) -> None:
        """End the worker, also while it compiles. Idempotent."""
        self._is_closed = True
        self._end_worker()

    def _running_worker(self) -> "_WorkerProcess":
        present = self._worker
        if present is not None and present.is_alive:
            return present
        self._end_worker()
        try:
            worker = _WorkerProcess(MEMORY_BYTES)
            with self._lock:
                if self._is_closed:
                    worker.kill()
                    raise EngineStopped("the engine was stopped")
                self._worker = worker
            # While it imports.
            vocabulary = self._vocabulary or Vocabulary(self._tokenizer, self._vocab_size)
            tokens = json.dumps(asdict(vocabulary.tokens)).encode()
            (packed,) = worker.ask([tokens, *vocabulary.texts], STARTUP_S, lambda: True)
            vocabulary.take(packed)
            self._vocabulary = vocabulary
        except EngineStopped:
            raise
        except Exception as error:
            self._end_worker()
            if self._is_closed:
                raise EngineStopped("the engine was stopped") from error
            raise EngineError(
                f"grammars cannot be compiled: the worker does not start ({error!r})"
            ) from error
        return worker

    def _end_worker(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class _WorkerProcess:
    """A running `grammar_worker`, and the frames to and from it."""

    def __init__(self, memory_bytes: int) -> None:
        package_folder = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, (str(package_folder), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncserve.loop.grammar_worker", str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It needs no GPU, and a single thread.
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C is the server's to deal with
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._answers: BinaryIO = self._process.stdout  # type: ignore[assignment]
        # So that nothing is left of it when it dies, also while nobody asks it for anything.
        self._reaper = threading.Thread(target=self._process.wait, name="reap-grammar-worker", daemon=True)
        self._reaper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, parts: Sequence[bytes], limit_s: float, is_wanted: Callable[[], bool]) -> list[bytes]:
        """Send a frame and return the one that answers it.

        Raises:
            TimeoutError: It took longer than `limit_s`; the process is dead.
            NobodyWaits: It took longer than `WORTH_ENDING_S` and was not wanted; the process is dead.
            EOFError: The process has died.
        """
        has_answered = threading.Event()
        why_ended: list[Exception] = []

        def watch() -> None:
            began_s = time.monotonic()
            while not has_answered.is_set():
                took_s = time.monotonic() - began_s
                if took_s >= limit_s:
                    why_ended.append(TimeoutError())
                elif took_s >= WORTH_ENDING_S and not is_wanted():
                    why_ended.append(NobodyWaits())
                if why_ended:
                    self._process.kill()
                    return
                has_answered.wait(min(LOOK_S, limit_s - took_s))

        watcher = threading.Thread(target=watch, name="watch-grammar-worker", daemon=True)
        watcher.start()
        answer: list[bytes] | None = None
        failure: Exception | None = None
        try:
            write_frame(self._requests, *parts)
            answer = read_frame(self._answers)
        except (EOFError, OSError, ValueError) as error:  # ValueError: the streams were closed by `kill`
            failure = error
        finally:
            has_answered.set()
            watcher.join()  # it may be about to kill
        if why_ended:
            raise why_ended[0]
        if answer is None:
            raise EOFError from failure
        return answer

    def kill(self) -> None:
        """End the process and forget it. Idempotent."""
        self._process.kill()
        self._reaper.join()
        for stream in (self._requests, self._answers):
            # What was not written yet cannot be written any more.
            with contextlib.suppress(OSError):
                stream.close()
