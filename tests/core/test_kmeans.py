"""k-means finds groups that are there."""

import torch

from fedkd.core.kmeans import kmeans


def test_well_separated_groups_are_found_whatever_the_seed():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = torch.cat([centres, centres + 0.5, centres - 0.5])
    for seed in (0, 1, 2**62):
        centroids, label = kmeans(points, 3, seed)
        assert torch.equal(label[:3], label[3:6])
        assert torch.equal(label[:3], label[6:])
        assert torch.allclose(centroids[label[:3]], centres)


def test_one_cluster_is_the_mean():
    points = torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]])
    centroids, label = kmeans(points, 1, 0)
    assert centroids.tolist() == [[[3.0], [5.0]]]
    assert label.tolist() == [0, 0]


def test_as_many_clusters_as_points_are_the_points():
    points = torch.tensor([[1.0], [4.0], [9.0]])
    centroids, label = kmeans(points, 3, 0)
    assert torch.equal(centroids[label], points)
