"""Noise at the clients, and the class sizes the server knows."""

import numpy as np
import torch
from tiny import Hidden, Linear, world

from fedkd.federation.fed import Federation
from fedkd.federation.ledger import Ledger


def federation(number=1, cohort=(0, 1, 2, 3), **how):
    return Federation(world(**how), number, np.array(cohort), Ledger())


def drawn(purpose="x", shape=(2, 3), **how):
    fed = federation(**how)
    return fed.up(fed.noise(purpose, *shape), "noise").stack()


def test_noise_is_a_function_of_seed_round_client_and_purpose():
    one = drawn()
    assert one.shape == (4, 2, 3)
    assert torch.equal(one, drawn())
    others = (drawn(seed=1), drawn(number=2), drawn(purpose="y"))
    assert all(not bool((one == other).any()) for other in others)
    assert len(one.unique()) == one.numel()  # no two clients draw the same


def test_a_client_draws_the_same_whoever_else_takes_part_and_whatever_runs_it():
    one = drawn()
    assert torch.equal(one[[1, 3]], drawn(cohort=(1, 3)))
    assert torch.equal(one, drawn(executor="vmapped"))
    assert torch.equal(one, drawn(architectures=(Hidden(), Linear())))


def test_noise_is_standard_normal():
    """Of 40,000 draws the mean deviates by 0.005, the variance by sqrt(2/40000) = 0.007, the fourth moment by 0.05."""
    noise = drawn(shape=(100, 100)).double()
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.square().mean()) - 1) < 0.03
    assert abs(float(noise.pow(4).mean()) - 3) < 0.25


def test_class_sizes_count_the_cohorts_training_samples():
    """Labels are 0, 1, 2, 0, ... over all samples; clients start at samples 0, 8, 22, 32 and hold 5, 11, 7, 13."""
    assert federation().class_sizes.tolist() == [[2, 2, 1], [4, 3, 4], [2, 3, 2], [4, 4, 5]]
    assert federation(cohort=(3, 0)).class_sizes.tolist() == [[4, 4, 5], [2, 2, 1]]
