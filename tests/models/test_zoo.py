"""The zoo: exact sizes, the seam of each model, what fits what, and mixtures."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fedkd.core.errors import ConfigError
from fedkd.models.mixed import assign, nets_of
from fedkd.models.net import MODELS, Net, Shape
from fedkd.models.vgg import VGG11, VGG13

CONF = Path(__file__).parents[2] / "conf" / "model"
DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SHAPES = {"digits": DIGITS, "mnist": MNIST, "fashion_mnist": MNIST, "cifar10": CIFAR, "svhn": CIFAR}
ZOO = sorted(set(MODELS) - {"mixed"})
SMALLEST = {"lenet": 16, "persfl_cnn": 16, "perfed_ckt_cnn": 16, "alexnet": 15, "vgg11": 32, "vgg13": 32, "cnn": 4}


def dense(*widths: int) -> int:
    """Parameters of fully connected layers."""
    return sum(a * b + b for a, b in pairwise(widths))


def convolutions(kernel: int, *channels: int) -> int:
    return sum(a * b * kernel**2 + b for a, b in pairwise(channels))


def net_of(name: str, shape: Shape = CIFAR, classes: int = 10, **fields: Any) -> Net:
    (net,) = nets_of({"name": name, **fields}, shape, classes).values()
    return net


VGG11_CONVOLUTIONS = convolutions(3, 3, 64, 128, 256, 256, 512, 512, 512, 512)
VGG13_CONVOLUTIONS = convolutions(3, 3, 64, 64, 128, 128, 256, 256, 512, 512, 512, 512)
RESNET18 = 11_689_512 - dense(512, 1000)  # torchvision's documented count without its ImageNet layer
SHUFFLENET = 2_278_604 - dense(1024, 1000)  # likewise


@pytest.mark.parametrize(
    ("name", "fields", "shape", "classes", "count", "derivation"),
    [
        ("mlr", {}, MNIST, 10, 7_850, dense(784, 10)),
        ("mlr", {}, DIGITS, 10, 650, dense(64, 10)),
        ("dnn", {}, MNIST, 10, 101_770, dense(784, 128, 10)),
        ("dnn", {"hidden": [100]}, MNIST, 10, 79_510, dense(784, 100, 10)),
        ("dnn", {"hidden": []}, MNIST, 10, 7_850, dense(784, 10)),
        ("dnn", {"hidden": [64, 32]}, DIGITS, 10, 6_570, dense(64, 64, 32, 10)),
        # McMahan et al. print 1,663,370: two pools leave 7x7 of 28x28
        ("cnn", {}, MNIST, 10, 1_663_370, convolutions(5, 1, 32, 64) + dense(64 * 7 * 7, 512, 10)),
        ("cnn", {"padding": 0}, MNIST, 10, 582_026, convolutions(5, 1, 32, 64) + dense(64 * 4 * 4, 512, 10)),
        ("cnn", {}, CIFAR, 10, 2_156_490, convolutions(5, 3, 32, 64) + dense(64 * 8 * 8, 512, 10)),
        ("cnn", {}, DIGITS, 10, 188_810, convolutions(5, 1, 32, 64) + dense(64 * 2 * 2, 512, 10)),
        ("small_cnn", {}, DIGITS, 10, 6_090, convolutions(3, 1, 16, 32) + dense(32 * 2 * 2, 10)),
        ("lenet", {}, CIFAR, 10, 62_006, convolutions(5, 3, 6, 16) + dense(400, 120, 84, 10)),
        ("lenet", {}, MNIST, 10, 44_426, convolutions(5, 1, 6, 16) + dense(256, 120, 84, 10)),
        ("persfl_cnn", {}, CIFAR, 10, 62_006, convolutions(5, 3, 6, 16) + dense(400, 120, 84, 10)),
        ("perfed_ckt_cnn", {}, CIFAR, 10, 76_336, convolutions(5, 3, 6, 16) + dense(400, 120, 100, 84, 50, 10)),
        (
            "alexnet",
            {},
            CIFAR,
            10,
            23_272_266,
            convolutions(3, 3, 64, 192, 384, 256, 256) + dense(256 * 2 * 2, 4096, 4096, 10),
        ),
        ("alexnet", {}, MNIST, 10, 20_125_386, convolutions(3, 1, 64, 192, 384, 256, 256) + dense(256, 4096, 4096, 10)),
        ("vgg11", {"batch_norm": False}, CIFAR, 10, 9_750_922, VGG11_CONVOLUTIONS + dense(512, 512, 512, 10)),
        # batch norm: a scale and a shift for each of 64 + 128 + 2·256 + 4·512 = 2752 channels
        ("vgg11", {}, CIFAR, 10, 9_756_426, VGG11_CONVOLUTIONS + dense(512, 512, 512, 10) + 2 * 2752),
        ("vgg13", {"batch_norm": False}, CIFAR, 10, 9_935_434, VGG13_CONVOLUTIONS + dense(512, 512, 512, 10)),
        # 2·(64 + 128 + 256) + 4·512 = 2944 channels
        ("vgg13", {}, CIFAR, 10, 9_941_322, VGG13_CONVOLUTIONS + dense(512, 512, 512, 10) + 2 * 2944),
        ("resnet18", {}, CIFAR, 10, 11_209_994, RESNET18 + dense(512, 64, 10)),
        ("resnet18", {}, CIFAR, 100, 11_215_844, RESNET18 + dense(512, 64, 100)),
        # a 3x3 stem instead of 7x7: FedHKD's printed 11.209 million tell the stem
        ("resnet18", {"small_stem": True}, CIFAR, 10, 11_202_314, RESNET18 + dense(512, 64, 10) - 3 * 64 * (49 - 9)),
        ("resnet18", {}, MNIST, 10, 11_203_722, RESNET18 + dense(512, 64, 10) - 2 * 64 * 49),  # one channel, not three
        ("shufflenet", {}, CIFAR, 10, 1_286_734, SHUFFLENET + dense(1024, 32, 10)),
        ("shufflenet", {"small_stem": True}, CIFAR, 10, 1_286_734, SHUFFLENET + dense(1024, 32, 10)),  # only its stride
        ("shufflenet", {}, MNIST, 10, 1_286_302, SHUFFLENET + dense(1024, 32, 10) - 2 * 24 * 9),
    ],
)
def test_parameter_counts_come_out_exactly(
    name: str, fields: dict[str, Any], shape: Shape, classes: int, count: int, derivation: int
) -> None:
    net = net_of(name, shape, classes, **fields)
    assert net.params == derivation == count
    assert net.params == sum(weight.numel() for weight in net.init(0).weights.values())


@pytest.mark.parametrize("name", ZOO)
def test_every_model_splits_into_features_and_a_linear_head(name: str) -> None:
    net = net_of(name)
    model, x = net.init(0), torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(0))
    features = net.features(model, x)
    assert features.shape == (3, net.feature_size)
    torch.testing.assert_close(net.head(model, features), net.predict(model, x))
    assert {weight: tuple(shape) for weight, shape in net.weights.items() if weight.startswith("head.")} == {
        "head.weight": (10, net.feature_size),
        "head.bias": (10,),
    }
    for last in (0, 1, 2):
        assert list(net.join(*net.split(model, last)).weights) == list(net.weights)
    assert net.split(model, 1)[1].weights.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ZOO)
def test_every_model_has_a_last_stage_that_runs_by_itself_at_any_width(name: str) -> None:
    net = net_of(name)
    model, x = net.init(0), torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(0))
    seen = net.forward(model, x)
    torch.testing.assert_close(net.stage(model, seen.stage_in), seen.stage_out, rtol=0, atol=1e-6)
    assert bool(net.inner) == (name not in ("mlr", "dnn"))  # a single layer has no inner channels
    narrow = net.stage(net.narrow(model, 0.25), seen.stage_in)
    assert torch.allclose(narrow, seen.stage_out, atol=1e-6) == (not net.inner)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet"])
def test_batch_norm_undoes_the_scale_of_a_narrow_stage(name: str) -> None:
    """So that it is the stage whose other inner channels are missing, nothing more."""
    net = net_of(name)
    model, x = net.init(0), torch.randn(8, *CIFAR, generator=torch.Generator().manual_seed(0))
    weights, stage_in = dict(model.weights), net.forward(model, x).stage_in
    for layer, channels in net.inner.items():
        missing = weights[f"{layer}.weight"].clone()
        missing[:, channels // 4 :] = 0
        weights[f"{layer}.weight"] = missing
    expected = net.stage(model._replace(weights=weights), stage_in)
    torch.testing.assert_close(net.stage(net.narrow(model, 0.25), stage_in), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("name", "stage_in", "stage_out", "inner"),
    [
        ("resnet18", (256, 2, 2), (512, 1, 1), {f"layer4.{i}.conv2": 512 for i in (0, 1)}),
        # half of stage 4's 464 channels go through a unit's second branch
        ("shufflenet", (232, 2, 2), (464, 1, 1), {f"stage4.{i}.branch2.5": 232 for i in range(4)}),
        ("cnn", (32, 16, 16), (512,), {"7": 64}),
    ],
)
def test_the_last_stage_is_that_of_the_paper(
    name: str, stage_in: tuple[int, ...], stage_out: tuple[int, ...], inner: dict[str, int]
) -> None:
    net = net_of(name)
    seen = net.forward(net.init(0), torch.zeros(2, *CIFAR))
    assert (seen.stage_in.shape[1:], seen.stage_out.shape[1:]) == (stage_in, stage_out)
    assert net.inner == {f"features.{layer}": channels for layer, channels in inner.items()}


@pytest.mark.parametrize("name", ["resnet18", "shufflenet"])
def test_the_features_are_torchvisions(name: str) -> None:
    import torchvision

    make = {"resnet18": torchvision.models.resnet18, "shufflenet": torchvision.models.shufflenet_v2_x1_0}[name]
    net, x = net_of(name), torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    model, theirs = net.init(0), make(num_classes=net.feature_size).eval()
    state = {key.removeprefix("features."): v for part in model for key, v in part.items() if "head" not in key}
    missing = theirs.load_state_dict(state, strict=False)
    assert all("num_batches" in key for key in missing.missing_keys)
    assert not missing.unexpected_keys
    assert torch.equal(net.features(model, x), theirs(x))


@pytest.mark.parametrize("name", ZOO)
def test_no_model_has_dropout_and_a_pass_leaves_the_images_alone(name: str) -> None:
    net = net_of(name)
    assert not any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in net._layers.training.module.modules())
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    assert torch.isfinite(net.forward(net.init(0), x).logits).all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["dnn", "cnn", "small_cnn", "lenet", "alexnet", "vgg11"])
def test_features_are_taken_after_their_non_linearity(name: str) -> None:
    net = net_of(name)
    features = net.features(net.init(0), torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(0)))
    assert features.min() == 0


@pytest.mark.parametrize("name", ZOO)
def test_a_model_fits_images_from_its_smallest_size_on_and_says_so_below_it(name: str) -> None:
    smallest = SMALLEST.get(name, 4)
    assert net_of(name, (1, smallest, smallest + 3)).classes == 10
    if name in SMALLEST:
        with pytest.raises(
            ConfigError,
            match=rf"model={name} does not fit images of {smallest - 1}x40, 1 channel: it needs at least "
            rf"{smallest}x{smallest}.\nChoose another model \(every dataset fits mlr and dnn\)",
        ):
            net_of(name, (1, smallest - 1, 40))


@pytest.mark.parametrize("name", ["cnn", "lenet", "alexnet", "vgg11"])
@pytest.mark.parametrize("shape", [(1, 33, 47), (3, 40, 32)])
def test_images_need_be_neither_square_nor_even(name: str, shape: Shape) -> None:
    assert net_of(name, shape).params > 0


@pytest.mark.parametrize(("vgg", "letter"), [(VGG11, "A"), (VGG13, "B")])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg_features_are_torchvisions(vgg: type[VGG11], letter: str, batch_norm: bool) -> None:
    from torchvision.models.vgg import cfgs, make_layers

    ours = vgg(batch_norm=batch_norm)._convolutions(3)
    theirs = make_layers(cfgs[letter], batch_norm=batch_norm)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x))


def test_vgg_starts_so_that_the_signal_survives_its_depth() -> None:
    weights = net_of("vgg11", batch_norm=False).init(0).weights
    kernels = [weight for weight in weights.values() if weight.dim() == 4]
    assert len(kernels) == 8
    for kernel in kernels:
        expected = (2 / (len(kernel) * 9)) ** 0.5  # He et al.: variance 2 / fan-out
        assert float(kernel.std()) == pytest.approx(expected, rel=0.1)


def test_only_models_of_torchvision_import_it_and_making_a_net_imports_no_compiler() -> None:
    program = """
import sys
from fedkd.models.mixed import nets_of
from fedkd.models.net import MODELS
assert len(MODELS) >= 13
nets_of({"name": "mixed", "members": ["mlr", "dnn", "cnn", "lenet", "alexnet"]}, (3, 32, 32), 10)
assert not {"torchvision", "torch._dynamo"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=CONF.parents[1])


def test_every_model_has_a_preset_that_names_its_command_and_its_size() -> None:
    presets = {name: (CONF / f"{name}.yaml").read_text() for name in MODELS}
    assert len(presets) == 13
    for name, text in presets.items():
        command, what, *_ = text.splitlines()
        dataset = re.fullmatch(rf"# fedkd model={name} dataset=(\w+)", command)
        assert dataset, command
        config = OmegaConf.to_container(OmegaConf.create(text))
        assert isinstance(config, dict)
        assert config.pop("defaults") == [{"/schema/model@_here_": name}, "_self_"]
        nets = nets_of({str(key): value for key, value in config.items()}, SHAPES[dataset[1]], 10)
        if name != "mixed":
            assert f": {nets[name].params:,} parameters." in what


def test_a_mixture_gives_one_net_for_each_member_and_numbers_those_that_differ_only_in_fields() -> None:
    members = ["mlr", "dnn", {"name": "dnn", "hidden": [64]}, {"name": "dnn", "hidden": [32], "init": "zeros"}]
    nets = nets_of({"name": "mixed", "members": members, "assign": "in_turn"}, DIGITS, 10)
    assert {name: net.params for name, net in nets.items()} == {
        "mlr": dense(64, 10),
        "dnn": dense(64, 128, 10),
        "dnn-2": dense(64, 64, 10),
        "dnn-3": dense(64, 32, 10),
    }
    assert [net.name for net in nets.values()] == list(nets)


def test_a_config_of_omegaconf_will_do_as_well_as_plain_values() -> None:
    config = OmegaConf.create({"name": "mixed", "members": ["mlr", {"name": "dnn", "hidden": [64]}]})
    assert list(nets_of(config, DIGITS, 10)) == ["mlr", "dnn"]  # type: ignore[arg-type]
    assert nets_of(OmegaConf.create({"name": "dnn", "hidden": [5]}), DIGITS, 10)["dnn"].feature_size == 5  # type: ignore[arg-type]


def test_all_problems_of_a_mixture_are_reported_together() -> None:
    members = [
        "lennet",
        {"name": "dnn", "hiden": [3]},
        {"name": "dnn", "hidden": 3},
        {"name": "cnn", "hidden": [0], "init": "one"},
        "vgg11",
        "mixed",
        {"hidden": [3]},
        "mlr",
        {"name": "mlr"},
    ]
    with pytest.raises(ConfigError) as raised:
        nets_of({"name": "mixed", "members": members, "assign": "by_sise"}, DIGITS, 10)
    expected = [
        "model.assign=by_sise does not exist. Did you mean by_size? There are: by_size, in_turn.",
        "model=lennet does not exist. Did you mean lenet or ",
        "model=dnn: field=hiden does not exist. Did you mean hidden? There are: hidden, init, projection.",
        "model=dnn: hidden=3 must be a list of numbers of at least 1.",
        "model=cnn: init=one does not exist. There are: default, zeros.",
        "model=cnn: hidden=[0] must be a list of numbers of at least 1.",
        "model=vgg11 does not fit images of 8x8, 1 channel: it needs at least 32x32.",
        "model=mixed cannot be a member of itself",
        "model.members has {'hidden': [3]}, which is neither a name nor a mapping with one.",
        "model=mixed has the member mlr twice with the same fields.",
    ]
    problems = raised.value.problems
    assert [problem[: len(start)] for problem, start in zip(problems, expected, strict=True)] == expected


def test_a_mixture_without_members_is_refused() -> None:
    with pytest.raises(ConfigError, match="model=mixed has no members; name some"):
        nets_of({"name": "mixed"}, DIGITS, 10)


def test_an_unknown_model_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"model=resnet does not exist\. Did you mean resnet18"):
        nets_of({"name": "resnet"}, CIFAR, 10)


def test_in_turn_gives_ktpfls_twenty_clients_five_of_each_of_four() -> None:
    nets = list(
        nets_of({"name": "mixed", "members": ["lenet", "alexnet", "resnet18", "shufflenet"]}, CIFAR, 10).values()
    )
    given = assign(nets, np.full(20, 300), "in_turn")
    assert given[:5].tolist() == [0, 1, 2, 3, 0]
    assert np.bincount(given).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("clients", [1, 2, 7, 100])
def test_by_size_gives_larger_models_to_clients_with_more_data(clients: int) -> None:
    nets = list(nets_of({"name": "mixed", "members": ["vgg13", "perfed_ckt_cnn", "vgg11"]}, CIFAR, 10).values())
    sizes = np.random.default_rng(0).permutation(clients) + 10
    given = assign(nets, sizes, "by_size")
    params = np.array([net.params for net in nets])[given]
    assert (np.diff(params[np.argsort(sizes)]) >= 0).all()
    counts = np.bincount(given, minlength=3)
    assert counts.sum() == clients
    assert counts.max() - counts.min() <= 1


def test_one_model_goes_to_everyone_by_either_rule() -> None:
    for how in ("in_turn", "by_size"):
        assert assign([net_of("mlr")], np.array([3, 1, 2]), how).tolist() == [0, 0, 0]
