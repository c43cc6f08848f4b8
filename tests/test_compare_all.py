"""The experiment that compares all methods has all methods in it."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fedkd import build, schema
from fedkd.algorithms.base import ALGORITHMS
from fedkd.cli import CONF

ROWS = yaml.safe_load((CONF / "experiment" / "compare_all.yaml").read_text(encoding="utf-8"))["table"]["row"]


def test_every_method_has_a_row_of_its_own():
    chosen = [row["overrides"][0].removeprefix("algorithm=") for row in ROWS.values()]
    assert sorted(chosen) == sorted(ALGORITHMS)


@pytest.mark.slow
def test_every_row_can_be_run():
    schema.register(CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for row in ROWS.values():
            config = compose("config", ["+experiment=compare_all", *row["overrides"]])
            build.parts(OmegaConf.to_container(config, resolve=True))  # raises with everything that is wrong
