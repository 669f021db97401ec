import torch

from asyncserve.gpu.attention.reference import ReferenceAttention
from tests.contracts.attention_contract import AttentionContract


class TestReference(AttentionContract):
    backend_class = ReferenceAttention
    device = torch.device("cpu")
