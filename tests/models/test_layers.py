"""Faster layers: torch's own, to rounding, and their gradients."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd.models import layers

LARGE = 64, 256, 128  # samples, inputs, outputs: 2^21 multiply-adds


def pair(samples, inputs, outputs, bias=True):
    torch.manual_seed(0)
    theirs = nn.Linear(inputs, outputs, bias=bias)
    ours = layers.Linear(inputs, outputs, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(samples, inputs, requires_grad=True)


def gradients(layer, x):
    return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [LARGE, (3, 5, 4)])
def test_a_linear_layer_and_its_gradients_are_torchs(sizes, bias):
    theirs, ours, x = pair(*sizes, bias=bias)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [LARGE, (3, 5, 4)])
def test_only_large_products_go_to_onednn_and_only_where_it_is_faster(sizes, library, monkeypatch):
    called = []
    apply = layers.Product.apply
    monkeypatch.setattr(layers.Product, "apply", lambda *parts: called.append(parts) or apply(*parts))
    _, ours, x = pair(*sizes)
    gradients(ours, x)
    expected = sizes == LARGE and library == "onednn"
    assert len(called) == (3 if expected else 0)  # forward, and backward for x and for the weight


@pytest.mark.usefixtures("library")
def test_a_large_product_can_be_differentiated_twice():
    found = []
    for layer, x in (pair(*LARGE)[::2], pair(*LARGE)[1:]):
        (slope,) = torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, layer.weight]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("library")
def test_what_has_a_shape_only_or_less_precision_stays_with_torch():
    _, ours, x = pair(*LARGE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    assert ours.double()(x.double()).dtype == torch.float64
    with FakeTensorMode():
        assert layers.Linear(256, 128)(torch.empty(64, 256)).shape == (64, 128)


def test_flatten_sends_gradients_back_as_its_input_lies():
    seen = {}
    for layout in (torch.channels_last, torch.contiguous_format):
        x = torch.randn(2, 3, 4, 4).contiguous(memory_format=layout).requires_grad_()
        inner = x * 1
        flat = layers.Flatten()(inner)
        inner.register_hook(lambda slope, layout=layout: seen.setdefault(layout, slope))
        assert torch.equal(flat, x.flatten(1))
        weight = torch.arange(48.0).expand(2, 48)
        torch.autograd.grad((flat * weight).sum(), x)
        assert torch.equal(seen[layout], weight.view(2, 3, 4, 4))
        assert seen[layout].is_contiguous(memory_format=layout)
