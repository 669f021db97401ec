import math

import pytest
import torch

from asyncserve.gpu.layers.embedding import Embedding, OutputHead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_are_products_with_the_rows_of_the_matrix(is_tied: bool, dtype: torch.dtype) -> None:
    embedding = Embedding(50, 16, dtype=dtype)
    embedding.weight.data.uniform_(-1, 1)
    head = OutputHead(50, 16, dtype=dtype, tied_to=embedding if is_tied else None)
    if head.weight is not None:
        head.weight.data.uniform_(-1, 1)
    matrix = (embedding.weight if head.weight is None else head.weight).float().clone()
    hidden = torch.randn(3, 16).to(dtype)
    before = head.forward(hidden)
    head.finish_loading()
    after = head.forward(hidden)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for logits in (before, after):
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), hidden.float() @ matrix.T, atol=tolerance, rtol=tolerance)
    given = torch.empty(3, 50, dtype=dtype)
    assert head.forward(hidden, out=given) is given
    assert torch.equal(given, after)


def test_the_scale_of_vectors_is_rounded_to_their_dtype_first() -> None:
    embedding = Embedding(3, 4, dtype=torch.bfloat16, scale=55.4256)
    embedding.weight.data.copy_(torch.tensor([1.0, 3.0, -2.0]).bfloat16()[:, None].expand(3, 4))
    assert embedding.forward(torch.tensor([0, 1, 2]))[:, 0].tolist() == [55.5, 166.0, -111.0]


def test_logits_may_be_capped() -> None:
    head = OutputHead(3, 2, dtype=torch.float32, tied_to=None, softcap=2.0)
    assert head.weight is not None
    head.weight.data.copy_(torch.tensor([[1.0, 0.0], [100.0, 0.0], [0.0, -4.0]]))
    head.finish_loading()
    hidden, out = torch.tensor([[1.0, 1.0]]), torch.empty(1, 3)
    expected = torch.tensor([[2 * math.tanh(0.5), 2.0, -2 * math.tanh(2.0)]])
    torch.testing.assert_close(head.forward(hidden), expected)
    assert head.forward(hidden, out=out) is out
    torch.testing.assert_close(out, expected)


def test_a_tied_head_has_no_parameter_of_its_own_and_leaves_the_table_for_look_ups() -> None:
    embedding = Embedding(5, 4, dtype=torch.float32)
    embedding.weight.data.copy_(torch.arange(20.0).view(5, 4))
    head = OutputHead(5, 4, dtype=torch.float32, tied_to=embedding)
    assert head.weight is None
    head.finish_loading()
    token_ids = torch.tensor([3, 0], dtype=torch.int32)
    assert embedding.forward(token_ids).tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]


def test_a_head_of_its_own_frees_the_plain_matrix_when_packed() -> None:
    head = OutputHead(5, 4, dtype=torch.float32, tied_to=None)
    head.finish_loading()
    if head.packed is None:
        pytest.skip("this build of torch packs no weights")
    assert head.weight is None
    assert list(head.parameters()) == []
