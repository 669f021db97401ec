"""Attention: the seam between models and the paged KV cache, and its implementations.

interface.py        what a layer asks, what a backend must do
registry.py         backends by name, and which one a device gets
row_groups.py       which decode rows are attended together
reference.py        plain torch, any device
cpu.py              made fast for processors
triton.py           by the Triton kernels, for CUDA devices
library_prefill.py  what the two backends share that leave prefill to a library:
flash_attn.py       to FlashAttention 4
flashinfer.py       to FlashInfer
"""
