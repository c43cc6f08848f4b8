"""With the disk store memory holds the clients of a round, however many there are."""

import os
import subprocess
import sys

import numpy as np
import pytest

WIDE = 3 * 32 * 32 * 1000 + 1000 + 1000 * 10 + 10  # parameters of model=dnn model.hidden=[1000]: 12 MB


def peak(directory, *overrides):
    """The most bytes a run has held."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkd", *overrides, "logger=quiet", f"hydra.run.dir={directory}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would take it to be running still
    assert process.returncode == 0
    assert (directory / "summary.json").exists()
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_the_states_of_absent_clients_are_not_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (800, 32, 32, 3), np.uint8), np.arange(800) % 10
    np.savez(tmp_path / "data.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    overrides = (
        *("algorithm=ditto", "model=dnn", "model.hidden=[1000]", "store=disk", "rounds=3", "local.steps=1"),
        *("dataset=npz", f"dataset.path={tmp_path / 'data.npz'}", "partition=iid", "public=none", "checkpoint.every=1"),
    )
    few = peak(tmp_path / "few", *overrides, "clients=10")
    many = peak(tmp_path / "many", *overrides, "clients=200", "participation=0.05")  # 10 a round; all 200 are judged
    assert 4 * WIDE * 200 > 2.4e9
    assert many - few < 1e9
