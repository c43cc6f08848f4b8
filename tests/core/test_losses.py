"""Losses on batches."""

import torch

from fedkd.core.losses import length


def test_a_length_is_the_euclidean_norm_and_its_gradient_at_0_is_0():
    v = torch.tensor([[3.0, -4.0], [0.0, 0.0]], requires_grad=True)
    found = length(v)
    assert found.tolist() == [5.0, torch.finfo(torch.float32).tiny ** 0.5]
    (slope,) = torch.autograd.grad(found.sum(), v)
    torch.testing.assert_close(slope, torch.tensor([[0.6, -0.8], [0.0, 0.0]]))
