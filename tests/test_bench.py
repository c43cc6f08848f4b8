"""The benchmark runs: its sections, and every method it times."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedkd.algorithms.base import ALGORITHMS

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))


def test_every_method_is_timed_or_told_of():
    import bench

    like_others = {"ifca": "hypcluster", "topk_pfl": "sim_pfl", "cgpfl_heur": "cgpfl"}
    elsewhere = {"fedavg", "feddf", "pfeddf", "fedalign", "persfl"}
    assert set(ALGORITHMS) == {*bench.COSTS, *like_others, *elsewhere}
    assert set(like_others.values()) <= set(bench.COSTS)
    for name, (values, trainings, forwards) in bench.COSTS.items():
        assert ALGORITHMS[name](**values).name == name
        assert trainings >= 1
        assert forwards >= 0


@pytest.mark.slow
@pytest.mark.parametrize(("section", "told"), [("growth", "512"), ("absent", "were held"), ("persfl", "times")])
def test_a_section_runs(section, told):
    command = [sys.executable, str(SCRIPTS / "bench.py"), section, "--rounds", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_a_section_that_does_not_exist_is_refused():
    command = [sys.executable, str(SCRIPTS / "bench.py"), "grwth"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no grwth; there are lr_mnist" in done.stderr
