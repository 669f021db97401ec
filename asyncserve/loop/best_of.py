"""The best of several continuations: more sequences than the client is given choices.

A `BestOfSink` stands before the sink of a request with `best_of` above `n`. It keeps the outputs of all
sequences until the last has ended, then gives the sink the `n` best, whole, as its choices. Knows no step.
"""

import dataclasses
from array import array

from asyncserve.errors import AsyncserveError
from asyncserve.request import FinishReason, OutputSink, Request, RequestOutput, SamplingParams, merge_all


def with_scores(request: Request) -> Request:
    """Return the request with the log-probabilities that its sequences are ranked by."""
    sampling = request.sampling
    if sampling.use_beam_search or sampling.num_logprobs is not None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, num_logprobs=0))


class BestOfSink:
    """An `OutputSink` of a request's sequences that gives another one the best of them.

    Those of a beam search are ranked already, what it has not found is behind them. One that failed is left
    out, unless too few are left.

    Args:
        sink: Gets `n` choices, best first, all at once. The tokens of those left out count among the first
            one's, so that the usage has all that were generated.
        sampling: What the client asked for.

    Attributes:
        sink: As given.
    """

    wants_usage = False

    def __init__(self, sink: OutputSink, sampling: SamplingParams) -> None:
        self.sink = sink
        self._sampling = sampling
        self._outputs: list[list[RequestOutput]] = [[] for _ in range(sampling.num_sequences)]
        self._num_open = sampling.num_sequences

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Pass it on."""
        self.sink.begin(prompt_token_ids)

    def put(self, output: RequestOutput) -> None:
        """Keep it; with the last one, give the sink the best."""
        self._outputs[output.index].append(output)
        if output.finish_reason is None:
            return
        self._num_open -= 1
        if not self._num_open:
            self._give(sorted(map(merge_all, self._outputs), key=self._rank))

    def fail(self, error: AsyncserveError) -> None:
        """Pass it on."""
        self.sink.fail(error)

    def _rank(self, output: RequestOutput) -> tuple[int, float]:
        """Return what is smaller for a better one; of equals the first is better."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return 2, 0.0
        if output.finish_reason is FinishReason.MISSING:
            return 1, 0.0
        logprobs = output.logprobs or ()  # none of a beam search
        return 0, -sum(each.logprob for each in logprobs) / max(1, len(logprobs))

    def _give(self, ranked: list[RequestOutput]) -> None:
        num = self._sampling.n
        num_more = sum(each.usage.num_output_tokens for each in ranked[num:] if each.usage is not None)
        # Of the others the whole prompt was there: the first had computed it.
        num_cached = min(
            (each.usage.num_cached_tokens for each in ranked if each.usage is not None), default=0
        )
        hides_logprobs = self._sampling.num_logprobs is None
        for index, output in enumerate(ranked[:num]):
            usage = output.usage
            if usage is not None and index == 0:
                usage = dataclasses.replace(
                    usage,
                    num_output_tokens=usage.num_output_tokens + num_more,
                    num_cached_tokens=num_cached,
                )
            logprobs = None if hides_logprobs else output.logprobs
            self.sink.put(dataclasses.replace(output, index=index, logprobs=logprobs, usage=usage))
