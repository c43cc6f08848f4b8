"""A command imports no more than it needs: what a person waits for is mostly imports."""

import os
import subprocess
import sys

HEAVY = {"torch", "torchvision", "wandb", "matplotlib", "sklearn", "scipy"}


def imported(directory, *arguments, **environment):
    """What `fedkd` prints, and the packages it imports on its way."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedkd", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "hydra" in modules
    return done.stdout + done.stderr, {module.partition(".")[0] for module in modules}


def test_the_help_imports_no_heavy_library(tmp_path):
    told, packages = imported(tmp_path, "--help", "algorithm=scaffold")
    assert "server_lr: 1.0" in told
    assert packages & {*HEAVY, "numpy", "rich"} == set()


def test_a_typo_is_told_without_a_heavy_library(tmp_path):
    told, packages = imported(tmp_path, "algorithm=scafold")
    assert "Did you mean scaffold" in told
    assert packages & HEAVY == set()


def test_the_shell_completes_without_a_heavy_library(tmp_path):
    line = "fedkd algorithm=scaf"
    told, packages = imported(tmp_path, "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert told.startswith("algorithm=scaffold")
    assert packages & HEAVY == set()


def test_a_dry_run_imports_no_logger_s_nor_plotting_nor_clustering_library(tmp_path):
    told, packages = imported(tmp_path, "dry_run=true")
    assert "nothing is trained" in told
    assert packages & HEAVY == {"torch"}
