"""How long a sequence may be that is to be served at all, and what to say of one that is longer.

Takes the lengths of prompt and output; refuses with the numbers that matter. Pure; does not know what runs.
"""

from collections.abc import Callable

from asyncserve.errors import InvalidRequest, PromptTooLong

HOLDERS = {
    "model": "the model's context",
    "option": "the context that --max-model-len allows here",
    "kv_cache": "the KV cache",
}
"""What a client is told to be too small, by what sets the limit."""


class SequenceLimits:
    """What the model, the KV pool and the step allow one sequence.

    Args:
        context_len: Most tokens of a sequence, whatever else there is.
        context_is_of: What sets that, as `ExecutorInfo.len_is_of`.
        pool_len: Most tokens that the KV cache holds.
        max_prompt_len: Most tokens of a prompt that must be computed in one step; None if it need not be.
        max_width: Most rows of a beam search.
        num_blocks: Blocks of the KV cache.
        most_blocks: Most blocks that a sequence of so many tokens holds; None: no beam search is served.

    Attributes:
        max_len: Most tokens, prompt and output, of one sequence: the lower one of both.
    """

    def __init__(
        self,
        *,
        context_len: int,
        context_is_of: str,
        pool_len: int,
        max_prompt_len: int | None,
        max_width: int,
        num_blocks: int,
        most_blocks: Callable[[int], int] | None,
    ) -> None:
        self._max_prompt_len = max_prompt_len
        self._max_width = max_width
        self._num_blocks = num_blocks
        self._most_blocks = most_blocks
        self.max_len = min(context_len, pool_len)
        self._holder = HOLDERS["kv_cache" if pool_len < context_len else context_is_of]

    def check(self, prompt_len: int, max_output_len: int) -> None:
        """Refuse a sequence that could never be served.

        Args:
            max_output_len: Most tokens it is to generate.

        Raises:
            PromptTooLong: It exceeds the context, the KV pool or, without chunked prefill, the token budget.
            InvalidRequest: The prompt is empty.
        """
        if prompt_len < 1:
            raise InvalidRequest("the prompt has no tokens; at least 1 is needed", param="prompt")
        if prompt_len >= self.max_len:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens; {self._holder} of {self.max_len} tokens must hold the"
                " prompt and at least 1 output token",
                param="prompt",
            )
        if self._max_prompt_len is not None and prompt_len > self._max_prompt_len:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens; without chunked prefill a step, and hence a prompt,"
                f" has at most {self._max_prompt_len} tokens",
                param="prompt",
            )
        total_len = prompt_len + max_output_len
        if total_len > self.max_len:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens, max_tokens is {max_output_len}, {total_len} together;"
                f" {self._holder} holds {self.max_len}",
                param="max_tokens",
            )

    def check_search(self, width: int, prompt_len: int, max_output_len: int) -> None:
        """Refuse a beam search that could never be served, or not after an interruption.

        Rows that come back from a preemption each compute what they know, in blocks of their own.

        Args:
            width: Its rows, each of which `check` has nothing against.
            max_output_len: Most tokens it is to generate.

        Raises:
            InvalidRequest: There are too few slots, tokens of a step or blocks for all rows at once, or the
                model has layers that keep a state.
        """
        if self._most_blocks is None:
            raise InvalidRequest(
                "this model has layers that keep a state, for which beam searches are not served",
                param="use_beam_search",
            )
        if width > self._max_width:
            raise InvalidRequest(
                f"a beam search of {width} rows is asked for; this server computes at most {self._max_width}"
                " at once",
                param="best_of",
            )
        total_len = prompt_len + max_output_len
        needed = width * self._most_blocks(total_len)
        if needed > self._num_blocks:
            raise InvalidRequest(
                f"a beam search of {width} rows of {total_len} tokens may need {needed} blocks of the KV"
                f" cache, which has {self._num_blocks}; ask for fewer tokens or a narrower search",
                param="max_tokens",
            )
