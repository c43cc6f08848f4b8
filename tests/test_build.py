"""Bad input is told in sentences, before training, everything at once."""

import numpy as np
import pytest
import torch
from runs import composed, npz, ran

from fedkd import build
from fedkd.core.errors import ConfigError, DataError


def problems(*overrides, **root):
    """The sentences a config is refused with, or none."""
    config = {**composed(*overrides), **root}
    try:
        parts = build.parts(config)
        build.data(config, parts.dataset, parts.partition, parts.public)
    except ConfigError as error:
        return error.problems
    return []


def test_a_config_without_problems_builds():
    assert problems() == []


def test_all_problems_of_a_config_are_told_at_once():
    told = problems(
        *("algorithm=fedavg", "model=mixed", "model.members=[mlr,dnn,lenet]", "objective=acc/personal/men"),
        *("participation=1.5", "sampling=by_sise", "eval.every=0", "device=tpu"),
        *("local.lr=-1", "local.optimizer=adm", "partition.alpha=0", "clients=5000", "logger.wandb.mode=of"),
    )
    sentences = (
        "averages parameters, but model=mixed gives the clients 3 architectures: mlr, dnn, lenet",
        "objective=acc/personal/men does not exist. Did you mean acc/personal/mean",
        "participation=1.5 must lie in (0, 1]",
        "sampling=by_sise does not exist. Did you mean by_size?",
        "eval.every=0 must be at least 1",
        "device=tpu does not exist",
        "local.lr=-1.0 must be positive",
        "local.optimizer=adm does not exist; there are sgd, adam",
        "partition.alpha=0.0 must be a positive number",
        "logger.wandb.mode=of does not exist",
        # of the data: 1,437 training images of 8x8, 200 of them held out
        "clients=5000, but there are only 1237 samples to share out",
        "model=lenet does not fit images of 8x8, 1 channel",
    )
    assert len(told) == len(sentences)
    for sentence in sentences:
        assert sum(sentence in problem for problem in told) == 1, sentence


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedper"])
def test_averaging_needs_one_architecture_and_the_error_says_what_to_type(name):
    (told,) = problems(f"algorithm={name}", "model=mixed")
    assert told.startswith(
        f"algorithm={name} averages parameters, but model=mixed gives the clients 3 architectures: "
        "mlr, dnn, small_cnn.\nChoose one architecture (model=mlr) or an algorithm that exchanges logits: "
    )
    assert "fedmd" in told
    assert problems(f"algorithm={name}", "model=mixed", "model.members=[dnn]") == []


def test_a_method_on_public_data_needs_some():
    (told,) = problems("algorithm=fedmd", "public=none")
    assert told.startswith("algorithm=fedmd exchanges predictions on public data, but public=none.")
    assert problems("algorithm=fedavg", "public=none") == []


@pytest.mark.parametrize("participation", [0, -0.5, 1.01, float("nan")])
def test_participation_lies_above_0_and_up_to_1(participation):
    (told,) = problems(participation=participation)
    assert told.startswith(f"participation={participation} must lie in (0, 1]")


def test_there_are_no_more_clients_than_samples():
    assert problems("clients=1237") == []
    (told,) = problems("clients=1238")  # 1,437 training images, 200 of them held out
    assert told.startswith("clients=1238, but there are only 1237 samples to share out. Choose clients=1237 or fewer")


def test_a_model_must_fit_the_images():
    # two 5x5 convolutions without padding, a 2x2 pool after each: 1 <- 2·1+4 = 6 <- 2·6+4 = 16
    (told,) = problems("algorithm=fedavg", "model=lenet")
    assert told.startswith("model=lenet does not fit images of 8x8, 1 channel: it needs at least 16x16.")


def test_what_the_data_refuse_is_told_together_too():
    told = problems("model=mixed", "model.members=[mlr,lenet,alexnet,cnnn]", "clients=5000")
    starts = ("clients=5000", "model=alexnet does not fit", "model=cnnn does not exist", "model=lenet does not fit")
    assert len(told) == len(starts)
    assert all(problem.startswith(start) for problem, start in zip(sorted(told), starts, strict=True))


WRONG = {
    "floats": ({"train_images": np.zeros((240, 4, 4))}, "train_images are float64 numbers"),
    "shape": ({"test_images": np.zeros((60, 4), np.uint8)}, "test_images have the shape (60, 4)"),
    "length": ({"train_labels": np.arange(239) % 3}, "train_images are 240, but train_labels 239"),
    "gap": ({"train_labels": np.arange(240) % 3 * 2}, "labels must be 0, 1, ..., classes - 1"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_npz_is_told_with_what_is_needed(fault, tmp_path):
    arrays, sentence = WRONG[fault]
    file = npz(tmp_path / "wrong.npz", **arrays)
    overrides = ("dataset=npz", f"dataset.path={file}", "public=none", "algorithm=fedavg")
    with pytest.raises(DataError) as caught:
        problems(*overrides)
    assert sentence in str(caught.value)
    assert "Needed are the arrays train_images" in str(caught.value)
    told = problems(*overrides, "participation=2")
    assert len(told) == 2
    assert sentence in told[1]


def test_a_right_npz_runs(tmp_path):
    file = npz(tmp_path / "right.npz", shape=(4, 5, 3))
    assert 0 <= ran(tmp_path, "dataset=npz", f"dataset.path={file}", "public.size=8", "rounds=1") <= 1


def test_a_wrong_config_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("fedkd.data.datasets._download", lambda *_: pytest.fail("a download"))
    told = problems(
        "dataset=mnist", f"dataset.root={tmp_path}", "public=cifar100", f"public.root={tmp_path}", "rounds=0"
    )
    assert told == ["rounds=0 must be at least 1."]


UNKNOWN = {
    "sampling": ("unifrm", "uniform"),
    "store": ("dsk", "disk"),
    "on_nan": ("stopp", "stop"),
    "precision": ("bf61", "bf16"),
    "objective": ("acc/shard/global", "acc/shared/global"),
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_name_is_told_with_the_near_ones(key):
    typed, meant = UNKNOWN[key]
    (told,) = problems("algorithm=fedavg", **{key: typed})
    assert told.startswith(f"{key}={typed} does not exist. Did you mean {meant}")


@pytest.mark.parametrize("node", ["algorithm", "dataset", "partition", "public", "executor"])
def test_an_unknown_entry_is_told_with_the_near_ones(node):
    entries = {
        "algorithm": "fedavg",
        "dataset": "digits",
        "partition": "iid",
        "public": "holdout",
        "executor": "serial",
    }
    config = composed()
    told = problems(**{node: {**config[node], "name": f"{entries[node]}x"}})
    assert any(f"{node}={entries[node]}x does not exist. Did you mean {entries[node]}" in problem for problem in told)


LOCAL = {
    "local.optimizer=sdg": "local.optimizer=sdg does not exist; there are sgd, adam.",
    "local.schedule=cosinus": "local.schedule=cosinus does not exist; there are constant, cosine, step, exponential.",
    "local.steps=0": "local.steps=0 must be at least 1.",
    "local.batch_size=-1": "local.batch_size=-1 must be at least 1.",
    "local.lr=0": "local.lr=0.0 must be positive.",
}


@pytest.mark.parametrize("override", LOCAL)
def test_local_training_that_cannot_be_is_told(override):
    assert problems(override) == [LOCAL[override]]


def test_a_device_this_machine_lacks_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (told,) = problems("device=cuda")
    assert told == "device=cuda is not on this machine, which has 0 of that kind. Try device=auto."
    assert build.device_of("auto") == build.device_of("cpu") == torch.device("cpu")


def test_the_headline_metric_is_one_this_run_will_have():
    (told,) = problems("algorithm=fedmd", "objective=acc/shared/mean")
    assert told == "objective=acc/shared/mean judges a server's model, but algorithm=fedmd has none."
    (told,) = problems("objective=acc/validation/mean")
    assert told == "objective=acc/validation/mean needs a validation split, e.g. partition.validation=0.1."
    split = ("partition.train=0.6", "partition.validation=0.15")
    assert problems("algorithm=fedavg", "objective=acc/validation/mean", *split) == []
    (told,) = problems("algorithm=fedavg", "objective=acc/sent/mean")
    assert told == "objective=acc/sent/mean judges what clients send up, which is not done: type eval.sent=true."
    assert problems("algorithm=fedavg", "objective=acc/sent/mean", "eval.sent=true") == []


def test_a_plugin_that_is_not_there_is_told():
    (told,) = problems(plugins=["no_such_module"])
    assert told.startswith("plugins=[no_such_module]: No module named 'no_such_module'.")


def test_public_samples_are_never_a_client_s(tmp_path):
    """A split from a file knows nothing of the public set, unless it says so."""
    file = tmp_path / "split.npz"
    everything = np.arange(1437)
    split = {"index": everything, "client": everything % 4, "role": everything // 4 % 4 // 3 * 2}
    np.savez(file, **split)
    (told,) = problems("partition=file", f"partition.path={file}")
    assert "gives the clients 200 of the 200 samples that public=holdout holds out" in told
    assert problems("partition=file", f"partition.path={file}", "algorithm=fedavg", "public=none") == []
    np.savez(file, **{name: array[50:] for name, array in split.items()}, public=everything[:50])
    assert problems("partition=file", f"partition.path={file}") == []
