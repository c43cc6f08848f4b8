"""Who learns how much from whom: a matrix of coefficients, mixtures by it, and its descent (KT-pFL, Eq. 7 and 11)."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkd.core import tree
from fedkd.core.tree import Tree

DOMAINS = ("simplex", "softmax", "none")
SHARPNESS = 5.0  # of the released code's softmax


class Block(NamedTuple):
    """What a matrix c [N, N] holds for a cohort of m clients."""

    at: Tensor  # [m]; the cohort
    weights: Tensor  # [m, m]; row n: the shares of the cohort's members in what member n receives
    mass: Tensor  # [m, 1]; how much of row n of c lies in the cohort's columns


def problems(lr: float, rho: float, domain: str) -> list[str]:
    """What is wrong with the hyperparameters of a descent, as sentences."""
    found = [] if lr > 0 else [f"algorithm.eta_3={lr:g} must be positive; algorithm.rho=inf keeps c at 1/N."]
    if rho < 0:
        found.append(f"algorithm.rho={rho:g} must not be negative.")
    if domain not in DOMAINS:
        found.append(f"algorithm.domain={domain} does not exist; there are {', '.join(DOMAINS)}.")
    return found


def uniform(clients: int, like: Tensor) -> Tensor:
    """Everyone learns equally from all: 1/N."""
    return like.new_full((clients, clients), 1 / clients)


def block(c: Tensor, cohort: np.ndarray, domain: str) -> Block:
    """The cohort's rows and columns, renormalised; who holds nothing for the cohort listens to itself.

    With domain `none` rows may sum to anything, even to nothing: they are scaled by N/m instead.
    """
    at = torch.from_numpy(cohort).to(c.device)
    rows = c[at[:, None], at]
    mass = rows.sum(1, keepdim=True)
    if domain == "none":
        mass = torch.full_like(mass, len(cohort) / len(c))
    itself = torch.eye(len(cohort), dtype=c.dtype, device=c.device)
    return Block(at, torch.where(mass > 0, rows / mass.where(mass > 0, 1), itself), mass)


def put_back(c: Tensor, block: Block, weights: Tensor) -> Tensor:
    """The matrix with these weights in the block's place; where rows are distributions, they stay so."""
    return c.index_put((block.at[:, None], block.at), block.mass * weights)


def shares(sizes: np.ndarray, like: Tensor) -> Tensor:
    """D_n/D as a column."""
    return torch.from_numpy(sizes / sizes.sum()).to(like)[:, None]


def mix(weights: Tensor, knowledge: Tree) -> Tree:
    """Σ_m c_nm s_m for every n, of a tree whose leaves have a first axis over m."""
    return tree.map(lambda s: (weights @ _flat(s)).view(len(weights), *s.shape[1:]), knowledge)


def kl_slope(weights: Tensor, s: Tensor) -> Tensor:
    """∂/∂c_nm of the mean over samples of KL(Σ_m c_nm s_m ‖ s_n), for probabilities s [m, samples, classes]."""
    tiny = torch.finfo(s.dtype).tiny
    mixture: Tensor = mix(weights, s)
    surprise = mixture.clamp_min(tiny).log() - s.clamp_min(tiny).log() + 1
    return _flat(surprise) @ _flat(s).T / s.shape[1]


def squared_slope(mixtures: Tree, knowledge: Tree) -> Tensor:
    """∂/∂c_nm of ‖Σ_m c_nm s_m − s_n‖²."""
    pairs = zip(tree.leaves(mixtures), tree.leaves(knowledge), strict=True)
    return 2 * torch.stack([_flat(mixture - s) @ _flat(s).T for mixture, s in pairs]).sum(0)


def mse_slope(weights: Tensor, s: Tensor) -> Tensor:
    """∂/∂c_nm of the mean squared error of Σ_m c_nm s_m to s_n, over samples and classes."""
    return squared_slope(mix(weights, s), s) / s[0].numel()


def descend(weights: Tensor, slope: Tensor, lr: float, rho: float, domain: str) -> Tensor:
    """One step along −slope, and one down ρ‖c − 1/m‖² taken implicitly, so that any ρ up to infinity is stable."""
    stepped = weights - lr * slope
    pulled = torch.lerp(stepped, torch.full_like(stepped, 1 / len(stepped)), 1 - 1 / (1 + 2 * lr * rho))
    return within(domain, pulled)


def within(domain: str, rows: Tensor) -> Tensor:
    """The rows made distributions: the nearest ones (`simplex`), softmax(5 c) (`softmax`); or as they are (`none`)."""
    if domain == "none":
        return rows
    return nearest_distributions(rows) if domain == "simplex" else torch.softmax(SHARPNESS * rows, -1)


def nearest_distributions(rows: Tensor) -> Tensor:
    """The Euclidean projection of each row on the simplex: max(row − θ, 0) with the θ that makes it sum to one."""
    rows = rows - rows.amax(-1, keepdim=True)  # changes nothing but the rounding
    falling = rows.sort(-1, descending=True).values
    count = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
    theta = (falling.cumsum(-1) - 1) / count  # were the first `count` entries the support
    support = (falling > theta).sum(-1, keepdim=True).clamp_min(1)
    return (rows - theta.gather(-1, support - 1)).clamp_min(0)


def _flat(s: Tensor) -> Tensor:
    return s.reshape(len(s), -1)
