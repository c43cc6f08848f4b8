"""The frame every architecture stands in: pure functions of parameters, whatever the network."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedkd.core import tree
from fedkd.core.errors import ConfigError
from fedkd.core.tree import Params
from fedkd.models.cnn import CNN, SmallCNN
from fedkd.models.mixed import nets_of
from fedkd.models.mlp import DNN, MLR
from fedkd.models.net import CHUNK, MODELS, Architecture, Net, Shape, register
from fedkd.models.split import Split
from fedkd.models.vgg import VGG11

SHAPE = (1, 8, 8)


class Block(nn.Module):
    """A residual block as ResNet's, in-place operations included."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


@dataclass(frozen=True)
class Residual(Architecture):
    name: ClassVar[str] = "residual"

    def module(self, shape: Shape, classes: int) -> Split:
        stem = nn.Conv2d(shape[0], 4, 3, stride=2)
        return Split(nn.Sequential(stem, Block(4), nn.AdaptiveAvgPool2d(2), nn.Flatten()), nn.Linear(16, classes))


@dataclass(frozen=True)
class Plain(Architecture):
    """A user's network: any module from images to logits, not a Split."""

    name: ClassVar[str] = "plain"
    outputs: int = 10

    def module(self, shape: Shape, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, self.outputs))


def images(count: int, shape: Shape = SHAPE) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def assert_same(a: tree.Tree, b: tree.Tree, tolerance: float = 0.0) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_init_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    net = Residual().net(SHAPE, 10)
    first = net.init(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert_same(net.init(3), first)
    assert not torch.equal(net.init(4).weights["head.weight"], first.weights["head.weight"])
    assert not any(leaf.requires_grad or leaf.is_meta for leaf in tree.leaves(first))


def test_init_can_start_every_weight_at_zero_but_not_the_running_variances() -> None:
    model = Residual(init="zeros").net(SHAPE, 10).init(0)
    assert not any(weight.any() for weight in model.weights.values())
    assert {float(value.sum()) for value in model.stats.values()} == {0.0, 4.0}  # means 0, four variances 1


def test_an_unknown_init_is_refused() -> None:
    with pytest.raises(ConfigError, match="model=mlr: init=zero does not exist"):
        MLR(init="zero").net(SHAPE, 10)


def test_what_is_predicted_is_the_head_of_the_features_however_many_images() -> None:
    net = Residual().net(SHAPE, 10)
    model, x = net.init(0), images(CHUNK + 3)  # two chunks
    features = net.features(model, x)
    assert features.shape == (CHUNK + 3, net.feature_size) == (CHUNK + 3, 16)
    assert_same(net.head(model, features), net.predict(model, x), 1e-6)
    assert_same(net.predict(model, x[-3:]), net.predict(model, x)[-3:], 1e-6)


def test_a_training_pass_updates_running_statistics_as_batch_norm_does_and_leaves_its_inputs() -> None:
    net = Residual().net(SHAPE, 10)
    model, x = net.init(0), images(6)
    module = Residual().module(SHAPE, 10).train()
    module.load_state_dict({**model.weights, **model.stats}, strict=False)  # without the counts of batches
    untouched = copy.deepcopy((model, x))
    output = net.forward(model, x)
    assert_same(output[:4], module(x))
    expected = dict(module.named_buffers())
    assert list(output.stats) == list(model.stats) == [name for name in expected if "num_batches" not in name]
    assert_same(output.stats, {name: expected[name] for name in output.stats})
    assert not torch.equal(output.stats["features.1.norm.running_mean"], model.stats["features.1.norm.running_mean"])
    assert_same((model, x), untouched)


def test_a_prediction_uses_the_running_statistics_and_so_each_image_alone() -> None:
    net = Residual().net(SHAPE, 10)
    model, x = net.init(0), images(6)
    assert_same(net.predict(model, x[:1]), net.predict(model, x)[:1], 1e-6)
    other = Params(model.weights, tree.map(lambda value: value + 1, model.stats))
    assert not torch.allclose(net.predict(other, x), net.predict(model, x))


@pytest.mark.parametrize("architecture", [DNN(hidden=(7,)), SmallCNN(channels=(3, 4)), CNN(hidden=(8,)), Residual()])
def test_gradients_of_stacked_clients_by_vmap_equal_those_of_one_client_after_another(
    architecture: Architecture,
) -> None:
    net = architecture.net(SHAPE, 10)
    models = [net.init(seed) for seed in range(3)]
    x, y = images(18).reshape(3, 6, *SHAPE), torch.arange(18).reshape(3, 6) % 10

    def loss(weights: dict[str, Tensor], stats: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, object]:
        output = net.forward(Params(weights, stats), x)
        return cross_entropy(output.logits, y), output.stats

    together = vmap(grad(loss, has_aux=True))(*tree.stack(models), x, y)
    for i, model in enumerate(models):
        leaves = tree.map(lambda weight: weight.clone().requires_grad_(), model.weights)
        value, stats = loss(leaves, model.stats, x[i], y[i])
        alone = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        assert_same(tree.take(together, i), (alone, stats), 1e-5)


class Narrow(nn.Module):
    """Two layers in sequence, of which only the first `kept` of four inner channels exist; their sum stands for all."""

    def __init__(self, model: Params, kept: int, side: int) -> None:
        super().__init__()
        w = {name.removeprefix("features."): weight for name, weight in model.weights.items()}
        self.first = w["1.weight"][:kept], w["1.bias"][:kept]
        self.scale = w["2.weight"][:kept], w["2.bias"][:kept]
        self.second = w["5.weight"][:, : kept * side**2] * 4 / kept, w["5.bias"]

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.conv2d(x, *self.first)
        scaled = nn.functional.batch_norm(inner, None, None, *self.scale, training=True).relu()
        return nn.functional.linear(scaled.flatten(1), *self.second).tanh()


@dataclass(frozen=True)
class Staged(Architecture):
    """A trunk, a stage with batch norm whose second layer reads flattened channels, a head."""

    name: ClassVar[str] = "staged"

    def module(self, shape: Shape, classes: int) -> Split:
        trunk = nn.Conv2d(shape[0], 3, 3)
        stage = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6), nn.Tanh()]
        return Split(nn.Sequential(trunk, *stage), nn.Linear(6, classes))


@pytest.mark.parametrize(("width", "kept"), [(0.25, 1), (0.5, 2), (1.0, 4), (0.01, 1)])
def test_a_narrow_stage_is_the_stage_built_with_fewer_inner_channels(width: float, kept: int) -> None:
    net = Staged().net(SHAPE, 10)
    model = net.init(0)
    seen = net.forward(model, images(6))
    assert net.inner == {"features.5": 4}
    narrow = net.stage(net.narrow(model, width), seen.stage_in)
    assert_same(narrow, Narrow(model, kept, 4)(seen.stage_in), 1e-6)
    assert torch.equal(narrow, seen.stage_out) == (width == 1)


@pytest.mark.parametrize("architecture", [DNN(hidden=(7, 6, 5)), SmallCNN(), CNN(hidden=(8,)), Residual(), Staged()])
def test_the_last_stage_leads_from_its_input_to_the_features_and_leaves_the_statistics(
    architecture: Architecture,
) -> None:
    net = architecture.net(SHAPE, 10)
    model, x = net.init(0), images(6)
    untouched = copy.deepcopy(model)
    seen = net.forward(model, x)
    assert_same(net.stage(model, seen.stage_in), seen.stage_out, 1e-6)
    assert_same(model, untouched)
    alone = net.forward(model, x[:1])  # by the running statistics, as one sample has no variance
    assert_same(net.stage(model, alone.stage_in), alone.stage_out, 1e-6)


def test_the_last_stage_is_by_default_the_last_two_layers() -> None:
    def seen(architecture: Architecture) -> tuple[list[str], tuple[int, ...], tuple[int, ...]]:
        net = architecture.net(SHAPE, 10)
        output = net.forward(net.init(0), images(2))
        return list(net.inner), tuple(output.stage_in.shape[1:]), tuple(output.stage_out.shape[1:])

    assert seen(DNN(hidden=(7, 6, 5))) == (["features.5"], (7,), (5,))
    assert seen(DNN(hidden=(7,))) == ([], (64,), (7,))  # one layer has no inner channels
    assert seen(MLR()) == ([], SHAPE, (64,))
    assert seen(CNN(channels=(3, 4), hidden=(8,))) == (["features.7"], (3, 4, 4), (8,))
    assert seen(SmallCNN(channels=(3, 4))) == (["features.3"], SHAPE, (4, 2, 2))  # maps, before they are flattened
    assert seen(Plain()) == (["features.3"], (64,), (10,))


def test_a_projection_comes_between_features_and_head_and_leaves_the_rest_as_it_was() -> None:
    plain, net = DNN(hidden=(7,)).net(SHAPE, 10), DNN(hidden=(7,), projection=4).net(SHAPE, 10)
    assert (plain.feature_size, net.feature_size) == (7, 4)
    assert net.layers == ["features.1", "projection.0", "projection.2", "head"]
    assert net.params == (64 * 7 + 7) + (7 * 7 + 7) + (7 * 4 + 4) + (4 * 10 + 10)
    model, x = net.init(0), images(5)
    before = plain.features(plain.init(0), x)  # the same seed, the same features below it
    w = model.weights
    hidden = (before @ w["projection.0.weight"].T + w["projection.0.bias"]).relu()
    expected = hidden @ w["projection.2.weight"].T + w["projection.2.bias"]
    assert_same(net.features(model, x), expected, 1e-6)
    assert_same(net.forward(model, x).features, expected, 1e-6)
    assert_same(net.head(model, expected), net.predict(model, x), 1e-6)


def test_an_impossible_projection_is_refused() -> None:
    with pytest.raises(ConfigError, match="model=dnn: projection=0 must be a number of at least 1"):
        DNN(projection=0).net(SHAPE, 10)
    with pytest.raises(ConfigError, match="projection goes before a linear head, and this model has none"):
        Plain(projection=3).net(SHAPE, 10)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_model_split_anywhere_joins_to_itself(last: int) -> None:
    net = Residual().net(SHAPE, 10)
    model = net.init(0)
    body, top = net.split(model, last)
    assert not body.weights.keys() & top.weights.keys()
    assert len({name.rpartition(".")[0] for name in top.weights}) == last
    joined = net.join(body, top)
    assert [list(part) for part in joined] == [list(part) for part in model]
    assert_same(joined, model)


def test_running_statistics_go_with_their_layer_when_a_model_is_split() -> None:
    net = Residual().net(SHAPE, 10)
    assert net.layers == ["features.0", "features.1.conv", "features.1.norm", "head"]
    body, top = net.split(net.init(0), 1)
    assert (list(top.weights), list(top.stats)) == (["head.weight", "head.bias"], [])
    body, top = net.split(net.init(0), 2)
    assert (len(body.stats), len(top.stats)) == (0, 2)


def test_a_module_of_a_plugin_joins_by_its_name_and_need_not_be_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._all()))
    monkeypatch.setattr(Plain, "name", Plain.name)  # restores what registering sets
    register("mine")(Plain)
    net = nets_of({"name": "mine"}, SHAPE, 10)["mine"]
    model, x = net.init(0), images(4)
    assert net.params == (64 * 5 + 5) + (5 * 10 + 10)
    expected = functional_call(Plain().module(SHAPE, 10), _unprefixed(model.weights), (x,))
    assert_same(net.predict(model, x), expected)
    assert_same(net.head(model, net.features(model, x)), expected)  # its features are its logits
    assert net.split(model, 1)[1].weights.keys() == {"features.3.weight", "features.3.bias"}


def _unprefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("features."): weight for name, weight in weights.items()}


def test_a_module_of_the_wrong_number_of_outputs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model=plain gives outputs of shape \(2, 9\) for 2 images; must be \(2, 10\)"
    ):
        Plain(outputs=9).net(SHAPE, 10)


def test_a_module_that_fails_on_the_image_size_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model=plain does not fit images of 28x28, 3 channels: .*\nChoose"):
        Plain().net((3, 28, 28), 10)


def test_a_net_holds_no_memory() -> None:
    nets = [VGG11().net((3, 32, 32), 10) for _ in range(5)]
    for net in nets:
        for module in (net._layers.training.module, net._layers.predicting.module):
            assert all(value.is_meta for value in (*module.parameters(), *module.buffers()))


def test_a_net_can_be_made_and_used_on_fake_tensors_as_a_dry_run_does() -> None:
    with FakeTensorMode():
        net = Residual().net(SHAPE, 10)
        assert net.predict(net.init(0), torch.empty(5, *SHAPE)).shape == (5, 10)


def test_has_convolution_and_batch_statistics_say_what_the_executors_need_to_know() -> None:
    def facts(architecture: Architecture) -> tuple[bool, bool]:
        net = Net(architecture, SHAPE, 10)
        return net.has_convolution, net.batch_statistics

    assert facts(DNN()) == (False, False)
    assert facts(SmallCNN()) == (True, False)
    assert facts(Residual()) == (True, True)


@dataclass(frozen=True)
class OwnStart(DNN):
    """A network that does not begin as its layers would."""

    name: ClassVar[str] = "own_start"

    def module(self, shape, classes):
        module = super().module(shape, classes)
        nn.init.zeros_(module.head.bias)
        return module


@pytest.mark.parametrize(("model", "again"), [(MLR(), True), (DNN(hidden=(5, 4)), True), (OwnStart(), False)])
def test_parameters_drawn_alone_are_those_of_a_network_built(model, again):
    net = Net(model, SHAPE, 10)
    assert (net._bounds is not None) == again
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        built = {name: p.detach() for name, p in net._build().named_parameters()}
    first = net.init(7).weights
    net.init(8)  # the next one leaves it alone
    assert list(first) == list(built)
    assert all(torch.equal(first[name], built[name]) for name in built)
