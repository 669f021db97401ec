"""Telling a model's ways of writing by its chat template: a table of what the families' templates show.

A template shows calls and reasoning of earlier turns as the model writes them, and often an example for the
model to follow. A rule fits if all its texts are in the template and none of its others; the first that fits
counts. Formats that no parser here reads are ruled out, where they share a marker with one that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """A parser's name, texts that its models' templates hold, and texts that they never hold."""

    parser: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...] = ()


TOOL_RULES: Sequence[Rule] = (
    # Mistral and Magistral: a call by itself since version 11 of the tokenizer, a JSON list before.
    Rule("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    Rule("mistral", ("[TOOL_CALLS]",)),
    # Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ. The same tag holds XML in Qwen3-Coder, GLM 4.5 and others.
    Rule("hermes", ("<tool_call>",), ("<function=", "<arg_key>", "<tool_sep>")),
    # Templates of Llama 3.2, Llama 4 and Gemma 3 that ask for Python.
    Rule("pythonic", ("[func_name1(",)),
    # Llama 3.1, 3.2, 3.3 and 4.
    Rule("llama3_json", ("<|python_tag|>", "parameters")),
    Rule("llama3_json", ('{"name": function name, "parameters": ',)),
)

REASONING_RULES: Sequence[Rule] = (
    # DeepSeek R1 and its distillations, Qwen 3, QwQ, SmolLM3 and many others.
    Rule("think", ("</think>",)),
    # Magistral.
    Rule("mistral", ("[/THINK]",)),
)


def detected(template: str, rules: Sequence[Rule]) -> str | None:
    """Return the parser of the first rule that fits a chat template; None if none does."""
    for rule in rules:
        if all(text in template for text in rule.shown) and not any(
            text in template for text in rule.not_shown
        ):
            return rule.parser
    return None
