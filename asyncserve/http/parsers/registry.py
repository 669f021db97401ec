"""Which model writes in which way: parsers by name, and by what the chat template shows.

A `MessageFormat` is made once per served model. It gives each choice of a request its parser, and the
grammar that holds an output to calls, or to an answer behind reasoning, in the model's own way of writing.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from asyncserve.errors import ConfigError
from asyncserve.http.parsers.detection import REASONING_RULES, TOOL_RULES, detected
from asyncserve.http.parsers.hermes import HERMES
from asyncserve.http.parsers.interface import MessageParser, ToolChoice
from asyncserve.http.parsers.llama_json import LLAMA3_JSON
from asyncserve.http.parsers.markers import MarkerSet
from asyncserve.http.parsers.message_parser import ChoiceParser
from asyncserve.http.parsers.mistral import MISTRAL, MISTRAL_ARGS
from asyncserve.http.parsers.pythonic import PYTHONIC
from asyncserve.http.parsers.reasoning import ReasoningSplitter, ReasoningTags
from asyncserve.http.parsers.structural_tags import (
    Shape,
    any_of,
    literal,
    optional,
    regex,
    sequence,
    shape_of,
    structural_tag,
    until,
)
from asyncserve.http.parsers.tool_format import ToolFormat
from asyncserve.request import StructuredOutput

AUTO = "auto"
NONE = "none"

THINK = ReasoningTags("<think>", "</think>")
MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")

TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "pythonic": PYTHONIC,
}
REASONING_PARSERS: Mapping[str, ReasoningTags] = {
    "deepseek_r1": THINK,
    "mistral": MISTRAL_THINK,
    "qwen3": THINK,
    "think": THINK,
}

DEFAULT_TOOL_PARSER = "hermes"
"""The form of calls that a model is asked for if nothing tells its own."""

SHOWN_SPECIAL_TOKENS = frozenset({"<s>", "</s>"})
"""Special tokens that are HTML as well, which an answer may hold; the tokens begin and end a model's text and
are hardly ever inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How the served model writes reasoning and tool calls.

    Args:
        tool_parser: Name of the form of its calls; None if nothing tells it.
        reasoning_parser: Name of the form of its reasoning; None if it does not reason.
        special_tokens: The texts of its special tokens.
    """

    tool_parser: str | None
    reasoning_parser: str | None
    special_tokens: frozenset[str] = frozenset()
    _special: MarkerSet | None = field(init=False, repr=False, compare=False)
    _dropped: Mapping[bool, MarkerSet | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Built once: there may be thousands. What is dropped depends on whether calls are read.
        object.__setattr__(self, "_special", _marker_set(self.special_tokens))
        hidden = self.special_tokens - SHOWN_SPECIAL_TOKENS
        dropped = {reads: _marker_set(hidden - self._markers(reads_calls=reads)) for reads in (False, True)}
        object.__setattr__(self, "_dropped", dropped)

    def parser(
        self, choice: ToolChoice, *, starts_in_reasoning: bool = False, includes_reasoning: bool = True
    ) -> MessageParser | None:
        """Return the parser of one choice's text; None if all of it is content.

        Args:
            choice: The tools of the request.
            starts_in_reasoning: The prompt has opened the reasoning.
            includes_reasoning: Give the reasoning too; else it is left out.
        """
        calls = self._tool_format.parser(choice) if _may_call(choice) else None
        tags = self._reasoning_tags
        if calls is None and tags is None:
            return None
        reasoning = None
        if tags is not None:
            reasoning = ReasoningSplitter(tags, is_open=starts_in_reasoning)
        return ChoiceParser(
            dropped=self._dropped[calls is not None] if self.needs_special_tokens(choice) else None,
            reasoning=reasoning,
            calls=calls,
            includes_reasoning=includes_reasoning,
        )

    def needs_special_tokens(self, choice: ToolChoice) -> bool:
        """Return whether the text must show special tokens, because markers are among them."""
        return not self.special_tokens.isdisjoint(self._markers(reads_calls=_may_call(choice)))

    def constraint(
        self, choice: ToolChoice, structured: StructuredOutput | None, *, starts_in_reasoning: bool
    ) -> StructuredOutput | None:
        """Return the shape the output must have, reasoning included; None leaves it free.

        Calls that must be made, and calls of strict tools, fit the tools' schemas. An answer that must
        have a shape may still be calls instead, if there are tools. Reasoning may come first, or must, if
        the prompt has opened it.
        """
        answer = self._answer(choice, structured)
        if answer is None:
            return structured
        param = "tools" if structured is None else structured.param
        return structural_tag(self._behind_reasoning(answer, is_open=starts_in_reasoning), param=param)

    def template_starts_reasoning(self, prompt_end: str) -> bool:
        """Return whether a prompt that ends so leaves the model inside its reasoning.

        The opening tag is the last thing in the prompt, or an unfinished message follows it: no closing tag,
        and no special token, such as those between messages.
        """
        tags = self._reasoning_tags
        if tags is None:
            return False
        _, tag, after = prompt_end.rpartition(tags.begin)
        if not tag or tags.end in after:
            return False
        return self._special is None or self._special.find(after, 0, is_all=True)[0] == len(after)

    @property
    def call_id_len(self) -> int | None:
        """How long the chat template wants the ids of earlier calls to be; None if it takes any."""
        return self._tool_format.call_id_len

    @property
    def _tool_format(self) -> ToolFormat:
        return TOOL_PARSERS[self.tool_parser or DEFAULT_TOOL_PARSER]

    @property
    def _reasoning_tags(self) -> ReasoningTags | None:
        return None if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]

    def _markers(self, *, reads_calls: bool) -> set[str]:
        tags = self._reasoning_tags
        markers = set() if tags is None else {tags.begin, tags.end}
        return markers.union(self._tool_format.markers) if reads_calls else markers

    def _answer(self, choice: ToolChoice, structured: StructuredOutput | None) -> Shape | None:
        """Return the shape of what follows the reasoning; None if it needs no other than `structured`."""
        tools = choice.tools
        tags = self._reasoning_tags
        shapes = self._tool_format.shapes
        special = self.special_tokens.intersection(self._tool_format.markers)
        is_single = not choice.parallel
        if choice.mode == "named":
            named = [tool for tool in tools if tool["name"] == choice.name]
            return shapes.calls(named, special, is_single=True)
        if choice.mode == "required":
            return shapes.calls(tools, special, is_single=is_single)
        if structured is None:
            if not _may_call(choice) or not any(tool.get("strict") for tool in tools):
                return None
            excludes = (
                [] if tags is None else [tag for tag in (tags.begin, tags.end) if tag in self.special_tokens]
            )
            return shapes.text(tools, special, is_single=is_single, excludes=excludes)
        if not _may_call(choice) and tags is None:
            return None
        answer = shape_of(structured)
        if answer is not None and _may_call(choice):
            answer = any_of(answer, shapes.calls(tools, special, is_single=is_single))
        return answer

    def _behind_reasoning(self, answer: Shape, *, is_open: bool) -> Shape:
        tags = self._reasoning_tags
        if tags is None:
            return answer
        special = self.special_tokens.intersection((tags.begin, tags.end))
        reasoning = [until(tags.end, special), regex(r"\n{0,2}")]
        if is_open:
            return sequence(*reasoning, answer)
        return sequence(optional(sequence(literal(tags.begin, special), *reasoning)), answer)


def _may_call(choice: ToolChoice) -> bool:
    return choice.mode != "none" and bool(choice.tools)


def message_format(
    *,
    tool_call_parser: str,
    reasoning_parser: str,
    chat_template: str | None,
    special_tokens: Iterable[str],
) -> MessageFormat:
    """Return how a model writes, from options and what its files show.

    Args:
        tool_call_parser: A name, `auto` to tell it by the chat template, or `none`.
        reasoning_parser: The same for reasoning.
        chat_template: The template's text, if there is one.
        special_tokens: The texts of the special tokens.

    Raises:
        ConfigError: No parser has such a name.
    """
    template = chat_template or ""
    tool_name = _chosen("--tool-call-parser", tool_call_parser, TOOL_PARSERS, detected(template, TOOL_RULES))
    if tool_name == "mistral" and "[ARGS]" in template:
        # One family with two forms: the template says which.
        tool_name = "mistral_args"
    reasoning_name = _chosen(
        "--reasoning-parser", reasoning_parser, REASONING_PARSERS, detected(template, REASONING_RULES)
    )
    return MessageFormat(
        tool_parser=tool_name,
        reasoning_parser=reasoning_name,
        special_tokens=frozenset(special_tokens) - {""},
    )


def _marker_set(texts: Set[str]) -> MarkerSet | None:
    return MarkerSet(texts) if texts else None


def _chosen(option: str, name: str, known: Iterable[str], detected_name: str | None) -> str | None:
    if name == AUTO:
        return detected_name
    if name == NONE:
        return None
    if name not in known:
        raise ConfigError(f"{option} is {name!r}; known: {AUTO}, {NONE}, {', '.join(sorted(known))}")
    return name
