"""Triton kernels, each with the function that launches it; torch's own composition stands in the layer above.

paging.py         what the paged attention kernels share
paged_decode.py   attention of rows of one token
paged_prefill.py  attention of rows of several tokens
rms_norm.py       RMSNorm
rotary.py         rotary positions, QK-norm and the KV cache write
sampling.py       from logits to token ids
gated_mul.py      the gate of an MLP
small_linear.py   products of up to eight tokens, with what comes before and after them
tiled_linear.py   products of up to 64 tokens, with what comes after them
truncation.py     what top-k, min-p and top-p keep
"""
