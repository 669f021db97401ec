"""The device side: a `StepPlan` comes in, a `StepOutput` goes out. No HTTP, no scheduling, no text.

In the order a step meets them:

executor.py      one thread owns the device; a first-in first-out inbox; errors of torch become ours
startup.py       device, model, weights, memory, KV cache, warm-up: gives a runner and what it offers
runner.py        one step: rows → batch → forward → sample → write back → copy out
graphs.py        CUDA graphs of whole steps: which sizes, which serves a step
slots.py         the token history: a persistent device row per running sequence
block_tables.py  block tables per KV group; slot mapping; what the device's copies lack
step_inputs.py   where a step's inputs are made: on the host, or by a kernel from rows on the device
batch.py         the step's tensors, each with shape and dtype; made from the plan and the rows
staging.py       one packed host-to-device copy a step; the ring its tokens come back through
host_blocks.py   blocks in the host's memory, and the copies to it and from it
kv_cache.py      the paged K and V of every layer
models/          one architecture a file
layers/          what models are made of
attention/       the seam of paged attention and its backends
kernels/         Triton kernels, for GPUs
sampling/        logits → tokens and log-probabilities
completion.py    device event → future on the event loop
device_errors.py what an exception means: a failed step, too little memory, or a lost device
weights.py       checkpoint files → named tensors
device.py        streams, events, pinned memory, memory figures, for cuda and cpu
"""
