"""How many tokens a text has: asked of the server, counted by a tokenizer, or guessed.

A data set gives texts, and a load needs lengths. A tokenizer's file gives them exactly; without one the
server's `/tokenize` is asked (asyncserve and vLLM have it), and a server without it leaves a guess of four
characters a token. Each text is counted once.
"""

import contextlib
import http.client
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 4
TIMEOUT_S = 60.0


class TokenCounts:
    """Counts tokens, and remembers.

    Args:
        count: Text → its tokens.
        origin: Who counts, for people.
    """

    def __init__(self, count: Callable[[str], int], origin: str) -> None:
        self.origin = origin
        self._count = count
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the tokens of a text."""
        if text not in self._known:
            self._known[text] = self._count(text)
        return self._known[text]


def by_tokenizer(path: Path) -> TokenCounts:
    """Count by a tokenizer.json, or the one in a folder.

    Raises:
        ValueError: There is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer: {file} is not there")
    tokenizer = Tokenizer.from_file(str(file))
    return TokenCounts(
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), f"counted by {file}"
    )


def by_server(url: str, *, model: str, api_key: str | None = None) -> TokenCounts:
    """Count by the server's /tokenize, or guess if it has none."""
    ask = _Asking(url, model, api_key)
    try:
        ask("a")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return guessed()
    return TokenCounts(ask, "counted by the server's /tokenize")


def guessed() -> TokenCounts:
    """Guess from the characters."""
    return TokenCounts(
        lambda text: -(-len(text) // CHARACTERS_PER_TOKEN),
        f"guessed: {CHARACTERS_PER_TOKEN} characters a token, for the server has no /tokenize",
    )


class _Asking:
    """Asks the server, each time anew: between two loads it may close what is not used."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = partial(kind, parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT_S)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __call__(self, text: str) -> int:
        fields = {"model": self._model, "prompt": text, "add_special_tokens": False}
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", self._path, json.dumps(fields), self._headers)
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200:
            raise ValueError(f"POST /tokenize: HTTP {answer.status}: {body[:200].decode(errors='replace')}")
        return int(json.loads(body)["count"])
