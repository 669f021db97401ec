"""From logits to token ids: in plain torch on a CPU, on a GPU with kernels for what every row needs.

`sampler` (the whole of it, per slot and step), `logit_bias`, `allowed_tokens`, `bad_words`, `penalties` and
`token_masks` (change the logits of the rows that ask), `truncation` (temperature, min-p, top-k, top-p),
`gumbel` (the random choice, stateless), `drawing` (both together, on a CPU), `choice` (the same by kernels),
`slot_values` (what they must know of each slot), `selection` (argmax and largest elements of long rows),
`logprobs` (what the model itself thought), `bit_masks` (most of a vocabulary forbidden at once), `upload`
(small arrays on their way to the device); `beams` (which rows of a beam search go on with which tokens).
"""
