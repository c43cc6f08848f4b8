"""Optimisers against torch.optim, schedules against their formulas."""

import math

import pytest
import torch

from fedkd.core import tree
from fedkd.core.fit import Descent, Fit, gradient
from fedkd.core.optim import SGD, Clipped, Local
from fedkd.core.tree import Params

CASES = [
    (Local(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (Local(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        Local(lr=0.1, momentum=0.5, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.2),
    ),
    (Local(lr=0.1, optimizer="adam"), lambda p: torch.optim.Adam(p, lr=0.1)),
    (
        Local(lr=0.1, optimizer="adam", weight_decay=0.3),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.3),
    ),
]


def loss(net, model, target):
    return sum((w - target).square().sum() for w in model.weights.values()) / 2, {}


@pytest.mark.parametrize(("local", "reference"), CASES)
def test_five_steps_are_those_of_torch(local, reference):
    start = {"a": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([3.0])}
    theirs = [w.clone().requires_grad_() for w in start.values()]
    optimizer = reference(theirs)
    ours = local.optimizer_at(local.lr)
    fit = Fit(Params(tree.map(torch.clone, start), {}), ours.init(start))
    step = Descent(loss, ours)
    for t in range(5):
        optimizer.zero_grad()
        (sum((w - t).square().sum() for w in theirs) / 2).backward()
        optimizer.step()
        fit = step(None, fit, torch.tensor(float(t)))
    for mine, w in zip(fit.model.weights.values(), theirs, strict=True):
        torch.testing.assert_close(mine, w.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("local", "reference"), CASES)
def test_stacked_clients_step_as_each_would_alone(local, reference):
    ours = local.optimizer_at(local.lr)
    start = {"a": torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0))}
    targets = torch.tensor([0.0, 1.0, 5.0])
    step = Descent(loss, ours)
    together = Fit(Params(tree.map(torch.clone, start), {}), torch.vmap(ours.init)(start))
    for _ in range(3):
        together = step.together(None, together, targets)
    for i in range(3):
        own = tree.take(tree.map(torch.clone, start), i)
        alone = Fit(Params(own, {}), ours.init(own))
        for _ in range(3):
            alone = step(None, alone, targets[i])
        torch.testing.assert_close(together.model.weights["a"][i], alone.model.weights["a"], rtol=1e-6, atol=1e-6)


def test_a_weight_that_the_loss_does_not_touch_has_gradient_zero():
    slope, _ = gradient(lambda w: (w["a"].sum(), {}), {"a": torch.ones(2), "b": torch.ones(3)})
    assert slope["a"].tolist() == [1, 1]
    assert slope["b"].tolist() == [0, 0, 0]


def test_schedules_follow_their_formulas():
    def rates(**kw):
        return [Local(lr=2.0, **kw).lr_at(t, 4) for t in (1, 2, 3, 4)]

    assert rates() == [2, 2, 2, 2]
    assert rates(schedule="exponential", decay=0.5) == [2, 1, 0.5, 0.25]
    assert rates(schedule="step", decay=0.5, decay_every=2) == [2, 2, 1, 1]
    # (1 + cos(π·done/rounds)): 2, 1 + cos 45°, 1, 1 − cos 45°
    assert rates(schedule="cosine") == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])


def test_wrong_settings_are_all_named():
    found = Local(epochs=None, lr=-1, optimizer="adma", schedule="linear", batch_size=0).problems()
    assert len(found) == 5


def test_a_clipped_gradient_keeps_its_direction_and_a_short_one_its_length():
    """‖(3, 4)‖ = 5: at most 1 leaves (0.6, 0.8); at most 6 or infinity leave it."""
    weights, gradient = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    for norm, expected in ((1.0, (-0.6, -0.8)), (6.0, (-3.0, -4.0)), (math.inf, (-3.0, -4.0))):
        moved, _ = Clipped(SGD(1.0), norm).update(tree.map(torch.clone, weights), gradient, ())
        assert (moved["a"].item(), moved["b"].item()) == pytest.approx(expected)
    still, _ = Clipped(SGD(1.0), 1.0).update(tree.map(torch.clone, weights), weights, ())
    assert (still["a"].item(), still["b"].item()) == (0, 0)
