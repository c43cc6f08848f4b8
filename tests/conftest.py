"""Tests run side by side, one thread each: threads that share a core wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; subprocesses inherit it

import pytest


@pytest.fixture(params=["torch", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that takes large products, whichever is the faster on this machine."""
    from fedkd.core import onednn

    monkeypatch.setattr(onednn, "faster", lambda: request.param == "onednn")
    return request.param
