"""Training at the server: what it steps on, when it ends, which model it keeps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.core.errors import FedkdError
from fedkd.core.fit import Patience, descend
from fedkd.core.optim import SGD, Adam
from fedkd.core.tree import Params

START = Params({"w": torch.tensor([4.0, -4.0])}, {})


def distance(net, model, target):
    """½ ‖w − target‖²: plain SGD at a rate of ½ halves the distance at each step."""
    return (model.weights["w"] - target).square().sum() / 2, model.stats


def halving(steps, patience=None):
    return descend(distance, None, START, batch=lambda t: torch.zeros(2), steps=steps, optimizer=lambda t: SGD(0.5),
                   patience=patience)  # fmt: skip


def test_it_takes_its_steps_and_leaves_the_start_as_it_was():
    found = halving(3)
    assert found.model.weights["w"].tolist() == [0.5, -0.5]
    assert found.steps == 3
    assert START.weights["w"].tolist() == [4, -4]


def test_batches_and_rates_are_functions_of_the_step():
    """Targets 0 and 8 at rates ½ and ¼: 4 → 2 → 2 + 6/4 = 3.5; −4 → −2 → −2 + 10/4 = 0.5."""
    found = descend(distance, None, START, batch=lambda t: torch.full((2,), 8.0 * t), steps=2,
                    optimizer=lambda t: SGD(0.5 / (t + 1)))  # fmt: skip
    assert found.model.weights["w"].tolist() == [3.5, 0.5]


def score(at):
    """How far w_0 is from `at`."""
    return lambda model: (model.weights["w"][0] - at).abs()


def test_the_model_with_the_least_score_is_kept():
    """w_0 is 4, 2, 1, 0.5, ...: 1 lies nearest to 1.1, and two steps later patience ends it."""
    found = halving(50, Patience(score(1.1), steps=2, every=1))
    assert found.model.weights["w"].tolist() == [1, -1]
    assert found.steps == 2


def test_scores_are_taken_at_their_times_and_at_the_end():
    """After 3, 6 and 7 steps: 4 / 2^3 = 0.5 lies nearer to 1.1 than what follows, and 4 / 2^7 nearest to 0."""
    assert halving(7, Patience(score(1.1), steps=10, every=3)).steps == 3
    assert halving(7, Patience(score(0.0), steps=10, every=3)).steps == 7


def test_the_last_digits_of_a_score_do_not_count():
    """Falls of 1e-5 a step are a plateau, however long."""
    scores = iter(1 - 1e-5 * t for t in range(100))
    found = halving(50, Patience(lambda model: torch.tensor(next(scores)), steps=5, every=1))
    assert found.steps == 0
    assert found.model is START


def test_nothing_moves_along_a_gradient_that_is_only_rounding():
    """Beside a slope of 1 one of 1e-7 is none, which Adam would follow as far; one of 1e-5 it does follow."""

    def slopes(net, model, size):
        return model.weights["w"] @ torch.tensor([1.0, size]), {}

    for size, moved in ((1e-7, 0.0), (1e-5, 0.1)):
        found = descend(slopes, None, START, batch=lambda t, s=size: s, steps=1, optimizer=lambda t: Adam(0.1))
        steps = START.weights["w"] - found.model.weights["w"]
        assert steps.tolist() == pytest.approx([0.1, moved], abs=1e-3)


def test_a_gradient_that_is_not_a_number_is_not_taken_for_rounding():
    with pytest.raises(FedkdError, match=r"server diverged \(NaN or infinity\) within 2 steps"):
        descend(distance, None, START, batch=lambda t: torch.tensor([0.0, float("nan")]), steps=2,
                optimizer=lambda t: SGD(0.5))  # fmt: skip


def test_on_fake_tensors_one_step_stands_for_all():
    seen = []
    with FakeTensorMode():
        start = Params({"w": torch.zeros(2)}, {})
        found = descend(distance, None, start, batch=lambda t: seen.append(t) or torch.zeros(2), steps=1000,
                        optimizer=lambda t: SGD(0.5), patience=Patience(score(0.0), 5, 1))  # fmt: skip
    assert seen == [0]
    assert found.model.weights["w"].shape == (2,)
