"""Trees of tensors: what is more than a map over leaves."""

import torch

from fedkd.core.tree import PIECE, squared_distances


def test_distances_of_rows_near_one_another_keep_their_digits():
    """Rows far from the origin, 1e-3 apart in each of 2·PIECE + 7 numbers: ‖·‖² = (2·PIECE + 7)·1e-6·(i − j)²."""
    start = torch.randn(2 * PIECE + 3, generator=torch.Generator().manual_seed(0)).double() + 1e5
    rows = torch.stack([start + i * 1e-3 for i in range(3)])
    tree = {
        "a": rows.view(3, -1),
        "none": torch.zeros(3, 0),
        "b": torch.arange(3.0).view(3, 1, 1).expand(3, 2, 2) * 1e-3,
    }
    apart = torch.tensor([[abs(i - j) for j in range(3)] for i in range(3)]).square()
    torch.testing.assert_close(squared_distances(tree), (2 * PIECE + 7) * 1e-6 * apart, rtol=1e-5, atol=1e-9)
