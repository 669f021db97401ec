"""The layers models are made of, in the order a token meets them.

embedding: token ids to hidden states, and hidden states to logits. norm: RMSNorm. linear: matrix products,
with weights packed for the CPU. rotary: rotary position embedding and its scalings. attention: projections,
rotation and the call into the paged cache. mlp: gated feed-forward. loading: how a checkpoint's tensors find
the parameters, and what is done once they have.

Layers call one another's `forward` by name: it is typed, and nn.Module's own call would add 0.6 µs to each,
a few percent of a small model's step. After `finish_layers` a layer is ready to run and is not loaded again.
"""
