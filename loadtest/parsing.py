"""What reading tool calls and reasoning costs: `python -m loadtest.parsing`, run in the repository's root.

Each parser reads a typical message of its format (some text, two calls, one of them with a page of code as
its argument), fed in pieces of about a token, as a stream feeds them. Reported: CPU time per piece in µs, the
median of several rounds and the best one, beside that of reading plain text with the same parser.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence

from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.registry import message_format

CODE = "\n".join(
    f'def step_{index}(x: int) -> int:\n    return x + {index}  # "quoted"\n' for index in range(20)
)
CALLS = (("get_weather", {"city": "Oslo", "days": 3, "units": ["C", "m/s"]}), ("write_file", {"text": CODE}))
BEFORE = "Let me look at the weather first, and write the file afterwards.\n\n"
REASONING = "<think>\nThe user asks for the weather and for a file. Both tools fit.\n</think>\n\n"
PLAIN = "The weather in Oslo is fine today; there is nothing to write (see above). " * 20
TOOLS = tuple({"name": name, "parameters": {"type": "object"}} for name, _ in CALLS)
TOKEN = re.compile(r"\s?\w{1,6}|\s+|[^\w\s]")


def messages() -> dict[str, str]:
    """Return a message of each format."""
    objects = [(name, json.dumps(arguments)) for name, arguments in CALLS]
    python = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in CALLS
    )
    hermes = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in objects
    )
    listed = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in objects)
    return {
        "hermes": BEFORE + hermes,
        "llama3_json": "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in objects),
        "mistral": f"{BEFORE}[TOOL_CALLS] [{listed}]",
        "mistral_args": BEFORE + "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in objects),
        "pythonic": f"[{python}]",
    }


def cost(name: str, reasoning: str, pieces: Sequence[str], num_rounds: int, num_calls: int) -> list[float]:
    """Return the CPU time per piece in µs of each round.

    Args:
        name: Of the tool parser.
        reasoning: Name of the reasoning parser.
        pieces: The text.
        num_rounds: Rounds to measure.
        num_calls: Calls the parser must find; else the figure means nothing.
    """
    written = message_format(
        tool_call_parser=name, reasoning_parser=reasoning, chat_template=None, special_tokens=()
    )
    rounds = []
    for _ in range(num_rounds):
        parser = written.parser(ToolChoice(tools=TOOLS, mode="auto"))
        assert parser is not None
        found = 0
        begin_s = time.process_time()
        for piece in pieces:
            found += sum(call.name is not None for call in parser.feed(piece).tool_calls)
        found += sum(call.name is not None for call in parser.finish().tool_calls)
        rounds.append((time.process_time() - begin_s) / len(pieces) * 1e6)
        if found != num_calls:
            raise SystemExit(f"{name} found {found} calls instead of {num_calls}")
    return rounds


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=200, help="rounds of each measurement")
    num_rounds = options.parse_args().rounds
    plain = TOKEN.findall(PLAIN)
    print(f"{'parser':<22}{'tokens':>7}{'µs/token':>10}{'best':>8}{'plain text':>12}{'best':>8}")
    for name, text in messages().items():
        for reasoning, before in (("none", ""), ("think", REASONING)):
            pieces = TOKEN.findall(before + text)
            calls = cost(name, reasoning, pieces, num_rounds, len(CALLS))
            texts = cost(name, reasoning, plain, num_rounds, 0)
            shown = name if reasoning == "none" else f"{name} + {reasoning}"
            print(
                f"{shown:<22}{len(pieces):>7}{statistics.median(calls):>10.2f}{min(calls):>8.2f}"
                f"{statistics.median(texts):>12.2f}{min(texts):>8.2f}"
            )


if __name__ == "__main__":
    main()
