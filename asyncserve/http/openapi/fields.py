"""What a body's types do not say of its fields: ranges, and the defaults that hold where one is left out.

`SamplingParams` and the checks of `schema` are what enforces ranges; here they are written down for
readers and for generators of requests. The tests hold both against each other.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from asyncserve.http.schema import MAX_CACHE_SALT_LEN, MAX_CHOICES, MAX_SEQUENCES, MAX_TOKEN_IDS
from asyncserve.request import DEFAULT_MAX_TOKENS, MAX_LENGTH_PENALTY, MAX_STOP_STRINGS, SamplingParams

MAX_ID = 2**31 - 1
"""No vocabulary has more tokens."""
MAX_LEN = 2**31 - 1
TOKEN_ID: Mapping[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_ID}
STOP = {"type": "string", "minLength": 1}

RANGES: Mapping[str, Mapping[str, Any]] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "length_penalty": {"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**63 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "max_tokens": {"minimum": 1, "maximum": MAX_LEN},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_LEN},
    "min_tokens": {"minimum": 0, "maximum": MAX_LEN},
    "stop": {"minLength": 1, "items": STOP, "maxItems": MAX_STOP_STRINGS},
    "stop_token_ids": {"items": TOKEN_ID, "maxItems": MAX_TOKEN_IDS},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_TOKEN_IDS,
    },
    "allowed_token_ids": {"items": TOKEN_ID, "minItems": 1},
    "bad_words": {"items": STOP},
    "truncate_prompt_tokens": {"minimum": -1, "maximum": MAX_LEN},
    "prompt_logprobs": {"minimum": -1},
    "max_output_tokens": {"minimum": 1, "maximum": MAX_LEN},
    "max_tool_calls": {"minimum": 1, "maximum": MAX_LEN},
    "messages": {"minItems": 1},
    "logprobs": {"minimum": 0},
    "top_logprobs": {"minimum": 0},
    "priority": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "cache_salt": {"minLength": 1, "maxLength": MAX_CACHE_SALT_LEN},
    "request_id": {"pattern": "^[!-~]{1,256}$"},
    "tokens": {"items": TOKEN_ID},
}
"""Keywords of JSON Schema by field; each goes to the branches of the field's type that it is about."""

OWN_RANGES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # With echo, 0 gives the prompt alone.
    ("CompletionBody", "max_tokens"): {"minimum": 0, "maximum": MAX_LEN},
    ("MessagesBody", "max_tokens"): {"minimum": 0, "maximum": MAX_LEN},
}
"""The same, where structs differ."""

PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_SEQUENCES},
        {"type": "array", "items": TOKEN_ID, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": TOKEN_ID, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_SEQUENCES,
        },
    ]
}
"""The four forms of a prompt."""

TYPES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("CompletionBody", "prompt"): PROMPT,
    ("Message", "role"): {"enum": ["system", "developer", "user", "assistant", "tool"]},
}
"""Types of fields that their structs leave open, by struct and field."""

DEFAULTS: Mapping[str, Any] = {
    **{
        each.name: each.default
        for each in dataclasses.fields(SamplingParams)
        if each.default is not dataclasses.MISSING and each.default not in (None, ())
    },
    "max_tokens": int(DEFAULT_MAX_TOKENS),
    "add_generation_prompt": True,
    "continue_final_message": False,
    "background": False,
    "echo": False,
    "include_reasoning": True,
    "is_error": False,
    "parallel_tool_calls": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "store": True,
    "truncation": "disabled",
    "priority": 0,
    "return_token_strs": False,
    "stream": False,
    "include_usage": False,
    "continuous_usage_stats": False,
}
"""What holds where a field is left out, if that is a value."""

OWN_DEFAULTS: Mapping[tuple[str, str], Any] = {
    ("ChatBody", "max_tokens"): None,
    ("MessagesBody", "max_tokens"): None,
    ("ChatBody", "logprobs"): False,
    ("ChatBody", "top_logprobs"): 0,
    ("ChatBody", "add_special_tokens"): False,
    ("CompletionBody", "add_special_tokens"): True,
}
"""The same, where structs differ; None says that there is no such value."""
