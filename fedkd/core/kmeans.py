"""k-means on tensors, as several papers' servers run it."""

import warnings

import torch
from torch import Tensor

from fedkd.core.tree import is_fake


def kmeans(points: Tensor, clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """The centroids [clusters, ...] of points [n, ...] and each point's cluster [n]: Lloyd's, from k-means++ starts."""
    if clusters == 1:
        return points.mean(0, keepdim=True), torch.zeros(len(points), dtype=torch.int64, device=points.device)
    if is_fake(points):
        return points[:clusters], torch.zeros(len(points), dtype=torch.int64, device=points.device)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    flat = points.reshape(len(points), -1).double().cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: some coincide
        found = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(flat)
    centroids = torch.from_numpy(found.cluster_centers_).to(points).view(clusters, *points.shape[1:])
    return centroids, torch.from_numpy(found.labels_).long().to(points.device)
