"""Without a GPU Triton's kernels run in its interpreter, which has to be chosen before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
