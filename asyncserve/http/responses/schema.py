"""The JSON of POST /v1/responses: every field of its body, once, with its type.

Structures as OpenAI's clients send them. They say what is read and of which type; what an item needs, what
this model can take and what becomes of it is `input`'s business. Fields that nobody reads are
ignored, as clients send back whole answers as input.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncserve.http.message_schema import MAX_MESSAGES, MAX_TOOLS
from asyncserve.http.schema import MAX_TOKEN_IDS

MAX_ITEMS = MAX_MESSAGES
"""Most input items of a response, those of earlier responses included."""
MAX_METADATA = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_IDENTIFIER_LEN = 512
"""Most characters of names that are only handed back: `user`, `safety_identifier`, `prompt_cache_key`."""

Identifier = Annotated[str, Meta(max_length=MAX_IDENTIFIER_LEN)]


class InputPart(msgspec.Struct, kw_only=True):
    """One part of an item's content. This model reads text."""

    type: Annotated[
        str,
        Meta(
            description="`input_text`, `output_text`, `refusal`, `reasoning_text` or `summary_text`;"
            " images, files and sound are refused"
        ),
    ]
    text: Annotated[str | None, Meta(description="The text; of every part but a `refusal`")] = None
    refusal: Annotated[str | None, Meta(description="The text of a `refusal`")] = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the input: a message, a call of a function, its output, or earlier reasoning."""

    type: Annotated[
        str | None,
        Meta(
            description="`message` (also if left out), `function_call`, `function_call_output` or `reasoning`"
        ),
    ] = None
    id: Annotated[str | None, Meta(description="The item's id, if it was part of a response")] = None
    status: Annotated[str | None, Meta(description="Not used")] = None
    role: Annotated[
        str | None, Meta(description="Of a message: `user`, `assistant`, `system` or `developer`")
    ] = None
    content: Annotated[
        str | list[InputPart] | None, Meta(description="Of a message or reasoning: the text, or parts of it")
    ] = None
    summary: Annotated[
        list[InputPart] | None, Meta(description="Of reasoning: shown to the model if there is no content")
    ] = None
    encrypted_content: Annotated[
        str | None, Meta(description="Of reasoning: not used, this server encrypts nothing")
    ] = None
    call_id: Annotated[str | None, Meta(description="Of a call and of its output: links the two")] = None
    name: Annotated[str | None, Meta(description="Of a call: the function")] = None
    arguments: Annotated[str | None, Meta(description="Of a call: a JSON object as text")] = None
    output: Annotated[
        str | list[InputPart] | None, Meta(description="Of a call's output: the text, or parts of it")
    ] = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool that the model may use. Only functions; tools that OpenAI hosts are refused."""

    type: Annotated[str, Meta(description="`function`")]
    name: Annotated[str | None, Meta(description="The function's name")] = None
    description: Annotated[str | None, Meta(description="What it does, for the model")] = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of its arguments; left out: any object")
    ] = None
    strict: Annotated[
        bool | None,
        Meta(description="Arguments must follow the schema even if the model may choose; false if left out"),
    ] = None


class ResponseToolName(msgspec.Struct, kw_only=True):
    """A tool, by name."""

    type: Annotated[str, Meta(description="`function`")] = "function"
    name: Annotated[str | None, Meta(description="The function's name")] = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """A choice of tools that is more than a word."""

    type: Annotated[str, Meta(description="`function` or `allowed_tools`")]
    name: Annotated[str | None, Meta(description="With `function`: the one to call")] = None
    mode: Annotated[str | None, Meta(description="With `allowed_tools`: `auto` or `required`")] = None
    tools: Annotated[
        Annotated[list[ResponseToolName], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="With `allowed_tools`: those that may be used"),
    ] = None


class ResponseTextFormat(msgspec.Struct, kw_only=True):
    """The shape of the answer's text."""

    type: Annotated[str, Meta(description="`text`, `json_object` or `json_schema`")]
    name: Annotated[str | None, Meta(description="With `json_schema`: for the client's own use")] = None
    description: Annotated[str | None, Meta(description="With `json_schema`: for the client's own use")] = (
        None
    )
    schema: Annotated[dict[str, Any] | None, Meta(description="With `json_schema`: the schema")] = None
    strict: Annotated[
        bool | None, Meta(description="With `json_schema`: taken; the schema is always kept to")
    ] = None


class ResponseText(msgspec.Struct, kw_only=True):
    """What the answer's text is to be like."""

    format: Annotated[ResponseTextFormat | None, Meta(description="Its shape")] = None
    verbosity: Annotated[str | None, Meta(description="Handed back, not used")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How the model is to think."""

    effort: Annotated[
        str | None, Meta(description="A variable for chat templates that know it; others ignore it")
    ] = None
    summary: Annotated[
        str | None,
        Meta(description="Handed back; reasoning is given in full, so it is not summarized"),
    ] = None
    generate_summary: Annotated[str | None, Meta(description="Older name of `summary`")] = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed response."""

    include_obfuscation: Annotated[
        bool | None, Meta(description="Taken; events are never padded with random characters")
    ] = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    model: Annotated[str | None, Meta(description="The model's name")] = None
    input: Annotated[
        str | list[InputItem] | None,
        Meta(description="What the model is to answer: a text, or items of a conversation"),
    ] = None
    instructions: Annotated[
        str | None,
        Meta(description="A system message before everything else; not carried over to the next response"),
    ] = None
    previous_response_id: Annotated[
        str | None, Meta(description="A stored response whose conversation goes on")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with events")] = None
    stream_options: Annotated[
        ResponseStreamOptions | None, Meta(description="Options of a streamed response")
    ] = None
    background: Annotated[
        bool | None, Meta(description="Go on without the client, who fetches the stored response later")
    ] = None
    store: Annotated[
        bool | None,
        Meta(description="Keep the response, in memory and for a while; true if left out"),
    ] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        Meta(description="`message.output_text.logprobs` adds log-probabilities; others add nothing here"),
    ] = None
    max_output_tokens: Annotated[
        int | None,
        Meta(description="Most tokens to generate, reasoning included; what the context leaves if left out"),
    ] = None
    temperature: Annotated[float | None, Meta(description="Logits are divided by it; 0 is greedy")] = None
    top_p: Annotated[
        float | None, Meta(description="Keep the smallest set of tokens whose probability reaches it")
    ] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Log-probabilities of so many of the likeliest tokens at each place")
    ] = None
    text: Annotated[ResponseText | None, Meta(description="What the answer's text is to be like")] = None
    tools: Annotated[
        Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Functions that the model may call"),
    ] = None
    tool_choice: Annotated[
        str | ResponseToolChoice | None,
        Meta(
            description="`none`, `auto`, `required`, a function to call, or the tools that are allowed;"
            " `auto` if there are tools"
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether one answer may hold several calls; true if left out")
    ] = None
    max_tool_calls: Annotated[
        int | None, Meta(description="Handed back; it is about hosted tools, of which there are none")
    ] = None
    reasoning: Annotated[ReasoningOptions | None, Meta(description="How the model is to think")] = None
    metadata: Annotated[
        dict[str, str] | None,
        Meta(description="Handed back: at most 16 texts of 512 characters, under names of 64"),
    ] = None
    truncation: Annotated[
        str | None,
        Meta(
            description="`disabled`: input that exceeds the context is refused. `auto`: it is cut at its"
            " beginning, to the tokens that fit"
        ),
    ] = None
    user: Annotated[Identifier | None, Meta(description="Handed back, not used")] = None
    safety_identifier: Annotated[Identifier | None, Meta(description="Handed back, not used")] = None
    prompt_cache_key: Annotated[
        Identifier | None, Meta(description="Handed back; equal beginnings are cached without it")
    ] = None
    service_tier: Annotated[
        str | None, Meta(description="Taken; there is one tier, which is reported as `default`")
    ] = None
    conversation: Annotated[Any, Meta(description="Refused: use `previous_response_id`")] = None
    prompt: Annotated[Any, Meta(description="Refused: there are no stored prompt templates here")] = None
    context_management: Annotated[
        list[Any] | None, Meta(description="Refused unless empty: nothing is compacted here")
    ] = None

    top_k: Annotated[int | None, Meta(description="Keep the k most likely tokens; 0 or -1 keeps all")] = None
    min_p: Annotated[
        float | None, Meta(description="Drop tokens less likely than so many times the likeliest")
    ] = None
    seed: Annotated[
        int | None,
        Meta(description="The same seed draws the same random numbers, as in /v1/chat/completions"),
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="Texts that end the answer")] = None
    stop_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)] | None,
        Meta(description="Token ids that end the answer"),
    ] = None
    min_tokens: Annotated[int | None, Meta(description="No end before so many tokens")] = None
    ignore_eos: Annotated[bool | None, Meta(description="The model's EOS does not end the answer")] = None
    presence_penalty: Annotated[
        float | None, Meta(description="Subtracted from the logits of tokens already generated")
    ] = None
    frequency_penalty: Annotated[
        float | None, Meta(description="The same, once for each time they were generated")
    ] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="Divides positive logits of tokens seen before, multiplies others")
    ] = None
    logit_bias: Annotated[
        Annotated[dict[int, float], Meta(max_length=MAX_TOKEN_IDS)] | None,
        Meta(description="Added to the logits of single tokens"),
    ] = None
    priority: Annotated[
        int | None, Meta(description="Lower runs first under `--scheduling-policy priority`")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached beginnings are shared only among equal salts")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="Further variables for the chat template, such as `enable_thinking`"),
    ] = None
    request_id: Annotated[str | None, Meta(description="An id for the call, as in `X-Request-Id`")] = None
