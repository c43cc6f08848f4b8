"""k-means finds groups that are there."""

import torch

from fedkd.core.kmeans import kmeans, match


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


def test_clusters_are_numbered_by_their_first_points():
    for seed in range(5):
        _, label = kmeans(torch.tensor([[9.0], [0.0], [9.1], [5.0], [0.1]]), 3, seed)
        assert label.tolist() == [0, 1, 0, 2, 1]


def test_points_of_many_numbers_have_the_centroids_of_their_clusters():
    """More numbers than points: others with the same distances are clustered, the centroids are means of these."""
    far = torch.zeros(4, 50)
    far[:, 7] = torch.tensor([100.0, 200.0, 102.0, 204.0])
    centroids, label = kmeans(far.view(4, 5, 10), 2, 0)
    assert label.tolist() == [0, 1, 0, 1]
    assert torch.allclose(centroids.view(2, 50)[:, 7], torch.tensor([101.0, 202.0]))
    assert not centroids.view(2, 50)[:, :7].any()


def test_more_clusters_than_distinct_points_coincide():
    centroids, label = kmeans(torch.tensor([[1.0], [1.0], [4.0]]), 3, 0)
    assert torch.equal(centroids[label], torch.tensor([[1.0], [1.0], [4.0]]))
    assert set(centroids.flatten().tolist()) == {1.0, 4.0}


def test_matching_keeps_each_number_once_and_moves_the_least():
    """The old 0 is nearest to both new ones, but can go on in one of them only."""
    old = torch.tensor([[0.0], [10.0]])
    assert match(old, torch.tensor([[4.0], [1.0]])).tolist() == [1, 0]  # 36 + 1 against 16 + 81
    assert match(torch.tensor([[0.0], [5.0], [10.0]]), torch.tensor([[9.0], [1.0]])).tolist() == [2, 0]
