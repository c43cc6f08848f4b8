"""How fast fedkd trains: four FedAvg workloads, the methods against FedAvg, and how time grows.

    python scripts/bench.py                                    # all of it, some minutes on two cores
    python scripts/bench.py lr_mnist dnn20 --against results.jsonl
    python scripts/bench.py growth methods persfl

The workloads need MNIST and CIFAR-10 in the cache ($FEDKD_DATA, or ~/.cache/fedkd). Each has a fixed model, split and
number of SGD steps, so that other simulators can be timed on the same work; `--against` names a file with a JSON line
for each of them (peer, workload, algorithm, samples_per_sec, split), and refuses lines of another split.

Beside fedkd stands the per-client loop one would write without a library; the two take turns, so that a busy machine
hurts both. Times are medians over rounds after a warm-up; evaluation is outside the clock.

    growth    time of a round with 10, 100 and 1,000 clients, and with one, two and four times the width
    absent    time of a round of 100 clients out of 100,000 over that of 100 out of 1,000, and the most memory held
    methods   time of a round of each method over FedAvg's, beside what its arithmetic says
    persfl    its second stage: ten clients with the 15 students of a grid each, against one student
"""

import fedkd  # noqa: F401 - before torch, whose OpenMP reads what it sets

# isort: split
import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedkd.algorithms.base import ALGORITHMS, Algorithm
from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.persfl import PersFL
from fedkd.core.optim import Local
from fedkd.data.datasets import Dataset, Images
from fedkd.data.partition import TRAIN, VALIDATION, Assignment
from fedkd.data.public import Public
from fedkd.engine import Engine, Settings, State
from fedkd.federation.executors import choose
from fedkd.federation.fed import Federation, World
from fedkd.federation.ledger import Ledger
from fedkd.federation.population import Population
from fedkd.federation.workers import Workers
from fedkd.logger.base import Loggers
from fedkd.models.cnn import CNN
from fedkd.models.mlp import DNN, MLR
from fedkd.models.net import Architecture, Net, Shape
from fedkd.models.split import Split


@dataclass(frozen=True)
class DropoutCNN(Architecture):
    """The small CNN of pfl-research's CIFAR-10 benchmark, dropout included."""

    name = "dropout_cnn"

    def module(self, shape: Shape, classes: int) -> Split:
        convolutions = (
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),  # before the ReLU, as in all of fedkd's networks: the same function
            nn.ReLU(),
            nn.Dropout(0.25),
        )
        dense = nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5)
        return Split(nn.Sequential(*convolutions, *dense), nn.Linear(128, classes))


@dataclass(frozen=True)
class Work:
    """One FedAvg workload: `sampled` of `clients` do one epoch a round."""

    dataset: str
    clients: int
    sampled: int
    batch: int
    lr: float
    model: Architecture
    split: Callable[[np.ndarray, np.random.Generator], list[np.ndarray]]
    rounds: int


def two_shards(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Sorted by label and cut into two shards a client: two classes or fewer each."""
    shards = np.array_split(np.argsort(labels, kind="stable"), 2000)
    return [np.concatenate([shards[a], shards[b]]) for a, b in rng.permutation(2000).reshape(1000, 2)]


def dirichlet(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Each class over 20 clients by Dir(0.1), drawn again until everyone has ten images."""
    while True:
        pieces: list[list[np.ndarray]] = [[] for _ in range(20)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.cumsum(rng.dirichlet(np.full(20, 0.1)))[:-1] * len(members)
            for mine, piece in zip(pieces, np.split(members, cuts.astype(int)), strict=True):
                mine.append(piece)
        if min(sum(map(len, mine)) for mine in pieces) >= 10:
            return [np.concatenate(mine) for mine in pieces]


def even(total: int, clients: int) -> Callable[[np.ndarray, np.random.Generator], list[np.ndarray]]:
    """`total` images at random, the same number to everyone."""
    return lambda labels, rng: np.split(rng.permutation(len(labels))[:total], clients)


WORKS = {
    "lr_mnist": Work("mnist", 1000, 10, 10, 0.03, MLR(), two_shards, 60),
    "dnn20": Work("mnist", 20, 20, 32, 0.05, DNN(hidden=(100,)), dirichlet, 7),
    "cnn20": Work("mnist", 20, 20, 32, 0.05, CNN(padding=0), even(6_000, 20), 5),
    "cifar_pfl": Work("cifar10", 1000, 50, 10, 0.1, DropoutCNN(), even(50_000, 1000), 5),
}
SECTIONS = (*WORKS, "growth", "absent", "methods", "persfl")


def world(images: Images, parts: list[np.ndarray], model: Architecture, local: Local, how: argparse.Namespace) -> World:
    """Clients that train on `parts` of the images; a fifth of their size more is for validation, shared by all."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held = np.repeat(np.arange(len(parts)), [max(1, len(part) // 5) for part in parts])
    index = np.concatenate([*parts, *(part[: max(1, len(part) // 5)] for part in parts)])
    role = np.repeat([TRAIN, VALIDATION], [len(owner), len(held)]).astype(np.uint8)
    assignment = Assignment(index, np.concatenate([owner, held]).astype(np.int32), role, np.arange(0))
    net = Net(model, images.shape, images.classes)
    population = Population.of(images, images, {net.name: net}, np.zeros(len(parts), np.int64), assignment)
    executor = choose(how.executor, net, torch.device("cpu"), None, "fp32")
    return World(population, {net.name: executor}, local, 10**6, 0, Public(per_round=1000), Workers(how.workers))


def engine(of: World, algorithm: Algorithm, sampled: int, store: str = "memory") -> Engine:
    settings = Settings(participation=sampled / len(of.population), store=store)
    return Engine(algorithm, of, settings, Path(tempfile.mkdtemp()), Loggers({}), {})


def noise(clients: int, samples: int) -> tuple[Images, list[np.ndarray]]:
    """Random images of MNIST's shape, for clients of one size."""
    rng, count = np.random.default_rng(0), clients * samples
    pixels = torch.from_numpy(rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, count))
    parts = np.split(np.arange(count), clients)
    return Images(pixels, labels, count, 10, torch.tensor([0.5]), torch.tensor([0.5])), parts


class Loop:
    """What one would write without a library: a module, torch.optim.SGD, a loop over clients and batches."""

    def __init__(self, work: Work, of: World) -> None:
        self.work = work
        images, (net,) = of.population.images, of.population.nets.values()
        self.module = net.architecture.module(net.shape, net.classes)
        # torch's default layout, as a DataLoader gives it; .contiguous() would keep one channel's channels last
        x = images.batch(torch.arange(images.train)).clone(memory_format=torch.contiguous_format)
        shards = map(torch.from_numpy, of.population.train.of(np.arange(work.clients)))
        self.data = [(x[rows], images.labels[rows]) for rows in shards]
        self.w = [p.detach().clone() for p in self.module.parameters()]
        self.rng = np.random.default_rng(0)

    def round(self) -> None:
        total = [torch.zeros_like(w) for w in self.w]
        cohort = self.rng.permutation(self.work.clients)[: self.work.sampled]
        samples = sum(len(self.data[client][1]) for client in cohort)
        for client in cohort:
            with torch.no_grad():
                for p, w in zip(self.module.parameters(), self.w, strict=True):
                    p.copy_(w)
            optimizer = torch.optim.SGD(self.module.parameters(), lr=self.work.lr)
            x, y = self.data[client]
            for rows in torch.split(torch.randperm(len(y)), self.work.batch):
                optimizer.zero_grad()
                F.cross_entropy(self.module(x[rows]).logits, y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, self.module.parameters(), strict=True):
                    t.add_(p, alpha=len(y) / samples)
        self.w = total


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turn(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median time of each call, by three turns of rounds that follow one another; the first of a turn warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(3):
        for call, taken in zip(calls, times, strict=True):
            taken.extend([timed(call) for _ in range(1 + -(-rounds // 3))][1:])
    return [statistics.median(taken) for taken in times]


def advancing(run: Engine) -> Callable[[], object]:
    state: State = run.start()
    return lambda: run.advance(state)


def against(file: str | None) -> dict[str, dict[str, tuple[float, str]]]:
    """By workload and peer, the best samples a second and the split they were measured on."""
    found: dict[str, dict[str, tuple[float, str]]] = {name: {} for name in WORKS}
    for text in Path(file).read_text().splitlines() if file else []:
        line = json.loads(text)
        if line.get("algorithm") == "fedavg" and "samples_per_sec" in line and line["workload"] in found:
            peers, peer = found[line["workload"]], line["peer"].split()[-1 if "torchrun" in line["peer"] else 0]
            peers[peer] = max(peers.get(peer, (0.0, "")), (line["samples_per_sec"], line["split"]))
    return found


def speed(names: list[str], how: argparse.Namespace) -> None:
    """The four workloads."""
    peers = against(how.against)
    print(f"\n{'work':<11}{'loop/s':>10}{'fedkd/s':>10}{'ratio':>8}  split")
    for name in names:
        work, rng = WORKS[name], np.random.default_rng(0)
        images = Dataset(work.dataset, [0.0], [1.0]).load()
        parts = [rng.permutation(part) for part in work.split(images.labels[: images.train].numpy(), rng)]
        checksum = f"{zlib.crc32(b''.join(part.astype(np.int64).tobytes() for part in parts)):08x}"
        of = world(images, parts, work.model, Local(epochs=1, batch_size=work.batch, lr=work.lr), how)
        calls = [Loop(work, of).round, advancing(engine(of, FedAvg(), work.sampled))]
        samples = sum(map(len, parts)) * work.sampled / work.clients
        slow, fast = (samples / seconds for seconds in in_turn(calls, how.rounds or work.rounds))
        print(f"{name:<11}{slow:>10,.0f}{fast:>10,.0f}{fast / slow:>7.2f}x  {checksum}", flush=True)
        for peer, (rate, split) in sorted(peers[name].items(), key=lambda item: -item[1][0]):
            note = "" if split == checksum else f"  another split, {split}: not comparable"
            print(f"  {peer:<19}{rate:>10,.0f}{fast / rate:>7.2f}x{note}")


def growth(how: argparse.Namespace) -> None:
    """Time of a round by clients and by width."""
    local = Local(epochs=1, batch_size=20, lr=0.01)
    print("\nDNN-128, 100 samples a client, batch 20: seconds a round, and for each client, by clients a round")
    for clients in (10, 100, 1000):
        of = world(*noise(clients, 100), DNN(), local, how)
        (seconds,) = in_turn([advancing(engine(of, FedAvg(), clients))], how.rounds or 5)
        print(f"{clients:>8}{seconds:>10.4f} s{1000 * seconds / clients:>10.3f} ms")
    print("the same with 40 clients, by hidden width")
    for width in (128, 256, 512):
        of = world(*noise(40, 100), DNN(hidden=(width,)), local, how)
        (seconds,) = in_turn([advancing(engine(of, FedAvg(), 40))], how.rounds or 5)
        print(f"{width:>8}{seconds:>10.4f} s")


def absent(how: argparse.Namespace) -> None:
    """What clients cost that sit a round out, for methods that keep models at the clients, on disk."""
    images, _ = noise(60_000, 1)
    rng, sampled, populations = np.random.default_rng(0), 100, (1_000, 100_000)
    print("\nMLR on 60,000 images of MNIST's shape, 20 samples a client, default local training, 100 clients a round")
    print(f"{'':<12}{'of 1,000':>12}{'of 100,000':>12}{'ratio':>8}")
    for name in ("fedavg", "ditto", "scaffold", "apfl"):
        calls = []
        for clients in populations:
            parts = list(rng.integers(0, len(images.labels), (clients, 20)))
            of = world(images, parts, MLR(), Local(), how)
            calls.append(advancing(engine(of, ALGORITHMS[name](), sampled, "disk")))
        for _ in range(30):  # until most of the fewer clients have taken part
            calls[0]()
        few, many = in_turn(calls, how.rounds or 21)
        print(f"{name:<12}{few:>10.4f} s{many:>10.4f} s{many / few:>8.2f}", flush=True)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"at most {held / 1e9:.2f} GB were held, the {images.pixels.nbytes / 1e9:.2f} GB of images among them")


# A method's work at the clients: trainings on as many samples as FedAvg's, and forward passes alone over as many. With
# 1,000 public samples beside clients of 400, a pass over the public samples is 2.5 of a client's; validation is a fifth
# of one. What servers do comes on top. Not here: feddf and pfeddf, which train at the server; fedalign, whose second
# pass is that of a block; persfl, which has its own section; cgpfl_heur, ifca and topk_pfl, which are like cgpfl,
# hypcluster and sim_pfl.
COSTS: dict[str, tuple[dict[str, object], float, float]] = {
    "local": ({}, 1, 0),
    "fedavg_ft": ({}, 1, 0),
    "fedprox": ({}, 1, 0),
    "scaffold": ({}, 1, 0),
    "fedper": ({}, 1, 0),
    "l2sgd": ({}, 1, 0),
    "ditto": ({}, 2, 0),
    "apfl": ({}, 2, 0),
    "perfedavg": ({"variant": "fo"}, 2, 0),
    "pfedme": ({"R": 20, "K": 5}, 5, 0),
    "cgpfl": ({"R": 20, "S": 5}, 5, 0),
    "moon": ({}, 1, 2),
    "fedproto": ({}, 1, 1),
    "fedhkd": ({"nu": 0.05}, 1, 1),  # of ten classes 0.25 would share none
    "fedgen": ({}, 1, 0),
    "fedamp": ({}, 1, 0),
    "fedfomo": ({}, 1, 7 / 5),  # of the first model, its own and five more
    "pfedhn": ({}, 1, 0),
    "hypcluster": ({"clusters": 4}, 1, 4),
    "fedmd": ({}, 1 + 2.5, 2.5),
    "sim_pfl": ({}, 1 + 2.5, 2.5),
    "ktpfl": ({}, 1 + 2.5, 2.5),
    "ktpfl_homo": ({}, 1, 0),
    "perfed_ckt": ({"public_batch_size": 20}, 2, 2 * 2.5),
}


def forward_share(net: Net) -> float:
    """How much of a training step's arithmetic is its forward pass: a third, more where the first layer is large."""
    model = net.architecture.module(net.shape, net.classes)
    x, y = torch.zeros(20, *net.shape), torch.zeros(20, dtype=torch.int64)
    flops = []
    for train in (False, True):
        with FlopCounterMode(display=False) as counter:
            loss = F.cross_entropy(model(x).logits, y)
            if train:
                loss.backward()
        flops.append(counter.get_total_flops())
    return flops[0] / flops[1]


def methods(how: argparse.Namespace) -> None:
    """Each method's round against FedAvg's, in turn, on a small network and on one that mostly computes."""
    local = Local(epochs=1, batch_size=20, lr=0.01)
    works = [(world(*noise(count, 400), model, local, how), count) for model, count in ((DNN(), 40), (CNN(), 6))]
    print("\nClients of 400 samples, batch 20: a round's time over FedAvg's, and by the arithmetic")
    print(f"{'':<12}{'40 DNN-128':>12}{'by flops':>10}{'6 CNNs':>12}{'by flops':>10}")
    for name, (values, trainings, forwards) in COSTS.items():
        print(f"{name:<12}", end="", flush=True)
        for of, count in works:
            calls = [advancing(engine(of, algorithm, count)) for algorithm in (FedAvg(), ALGORITHMS[name](**values))]
            one, other = in_turn(calls, how.rounds or 5)
            (net,) = of.population.nets.values()
            print(f"{other / one:>12.2f}{trainings + forwards * forward_share(net):>10.2f}", end="", flush=True)
        print(flush=True)


def persfl(how: argparse.Namespace) -> None:
    """All students of all clients against one student a client."""
    images, parts = noise(10, 450)
    of = world(images, parts, DNN(hidden=(100,)), Local(epochs=1, batch_size=32, lr=0.01), how)
    one, many = PersFL(imitation=(0.5,), temperature=(5.0,)), PersFL()
    (net,) = of.population.nets.values()
    fed = Federation(of, of.rounds, np.arange(10), Ledger())
    teacher = fed.down(net.init(0), "model")
    short, long = in_turn([lambda: one.distil(teacher, fed), lambda: many.distil(teacher, fed)], how.rounds or 7)
    print("\nPersFL, stage 2, 10 clients of DNN-100")
    grid = len(many.imitation) * len(many.temperature)
    print(f"{grid} students, of which {len(many.points)} differ, {long:.3f} s, 1 student {short:.3f} s: ", end="")
    print(f"{long / short:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=SECTIONS, metavar="WHAT", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, help="measured rounds, instead of each section's own number")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--workers", type=int, help="threads that train clients side by side; default: one a core")
    parser.add_argument("--against", metavar="FILE", help="other simulators' results, a JSON line each")
    how = parser.parse_args()
    if how.against and not Path(how.against).is_file():
        parser.error(f"--against {how.against}: there is no such file")
    if unknown := set(how.what) - set(SECTIONS):
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if names := [name for name in how.what if name in WORKS]:
        speed(names, how)
    for section in (growth, absent, methods, persfl):
        if section.__name__ in how.what:
            section(how)


if __name__ == "__main__":
    main()
