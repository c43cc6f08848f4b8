"""Functions without Python's lock: the same numbers, and Python itself where TorchScript cannot serve."""

import importlib
import pkgutil
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fedkd
from fedkd.core.unlocked import unlocked
from fedkd.models import chain, dense

RAN_IN_PYTHON: list[str] = []


def scaled(tensors: list[Tensor], factor: float) -> Tensor:
    if not torch.jit.is_scripting():
        noted()
    return tensors[0] * factor


@torch.jit.ignore
def noted() -> None:
    RAN_IN_PYTHON.append("here")


def beyond_its_language(tensors, factor):
    return sum(tensor * factor for tensor in {id(t): t for t in tensors}.values())


@pytest.fixture(autouse=True)
def _afresh():
    RAN_IN_PYTHON.clear()


def test_every_function_that_is_to_run_unlocked_does():
    found = {}
    for module in pkgutil.walk_packages(fedkd.__path__, "fedkd."):
        if "__main__" not in module.name:
            found |= {fn.__qualname__: fn for fn in vars(importlib.import_module(module.name)).values()
                      if hasattr(fn, "compiled")}  # fmt: skip
    found |= {f"{module.__name__}: walk": module._walking(module.of_labels) for module in (chain, dense)}
    assert len(found) >= 7
    for name, fn in found.items():
        assert isinstance(fn.compiled(), torch.jit.ScriptFunction), name


def test_plain_tensors_go_without_python_and_without_a_warning():
    fn = unlocked(scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fn([torch.tensor([2.0])], 3.0).tolist() == [6.0]
    assert not RAN_IN_PYTHON


def test_python_runs_it_in_a_lower_precision_under_vmap_and_for_shapes_alone():
    fn, x = unlocked(scaled), torch.tensor([2.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fn([x], 3.0).tolist() == [6.0]
    assert torch.vmap(lambda one: fn([one], 3.0))(x).tolist() == [6.0]
    with FakeTensorMode():
        assert fn([torch.empty(4)], 3.0).shape == (4,)
    assert len(RAN_IN_PYTHON) == 3


def test_python_runs_what_is_not_in_torchscripts_language():
    fn, x = unlocked(beyond_its_language), torch.tensor([2.0])
    assert fn([x, x.clone()], 3.0).tolist() == [12.0]
    assert fn.compiled() is beyond_its_language
