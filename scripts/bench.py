"""How fast fedkd trains, against a plain per-client PyTorch loop on the same work, in one run.

    python scripts/bench.py                    # all workloads, a few minutes on two cores
    python scripts/bench.py mlr dnn --rounds 5

Every workload is one FedAvg round: the same models, samples and number of SGD steps on both sides, data in memory.
Times are medians over rounds, the two sides in turn, so that a busy machine hurts both. The columns:
samples/s of the loop and of fedkd, their ratio, the share of the machine's matrix-multiply rate that fedkd's
arithmetic reaches, and the part of a round that is neither training nor evaluation.

`persfl` is another comparison: its second stage, ten clients with the 15 students of a grid each, against one student.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fedkd.algorithms.fedavg import FedAvg
from fedkd.algorithms.persfl import PersFL
from fedkd.core.optim import Local
from fedkd.data.datasets import Images
from fedkd.data.partition import Assignment
from fedkd.data.public import Public
from fedkd.engine import Engine, Settings, State
from fedkd.federation.executors import choose
from fedkd.federation.fed import Federation, World
from fedkd.federation.ledger import Ledger
from fedkd.federation.population import Population
from fedkd.logger.base import Loggers
from fedkd.models.mixed import nets_of


@dataclass(frozen=True)
class Work:
    model: dict[str, object]
    clients: int
    samples: int  # a client
    batch: int
    flops: int  # multiply-adds of one forward pass of one sample


WORKS = {
    "mlr": Work({"name": "mlr"}, 40, 400, 20, 784 * 10),
    "dnn": Work({"name": "dnn"}, 40, 400, 20, 784 * 128 + 128 * 10),
    "cnn": Work(
        {"name": "cnn", "padding": 0}, 10, 200, 20,
        24 * 24 * 25 * 32 + 8 * 8 * 25 * 32 * 64 + 1024 * 512 + 512 * 10,
    ),
}  # fmt: skip
GRID = Work({"name": "dnn", "hidden": [100]}, 10, 600, 32, 784 * 100 + 100 * 10)  # PersFL's DNN
COMPARISONS = [*WORKS, "persfl"]


def engine(work: Work, executor: str, validation: float = 0.0) -> Engine:
    """A FedAvg run on random images of MNIST's shape."""
    rng = np.random.default_rng(0)
    count = work.clients * work.samples
    pixels = torch.from_numpy(rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, count))
    images = Images(pixels, labels, count, 10, torch.tensor([0.5]), torch.tensor([0.5]))
    owner = np.repeat(np.arange(work.clients), work.samples).astype(np.int32)
    role = np.tile(np.arange(work.samples) >= work.samples * (1 - validation), work.clients).astype(np.uint8)
    assignment = Assignment(np.arange(count), owner, role, np.arange(0))
    nets = nets_of(work.model, images.shape, 10)
    population = Population.of(images, None, nets, np.zeros(work.clients, np.int64), assignment)
    executors = {name: choose(executor, net, torch.device("cpu"), None, "fp32") for name, net in nets.items()}
    world = World(population, executors, Local(epochs=1, batch_size=work.batch, lr=0.01), 100, 0, Public())
    return Engine(FedAvg(), world, Settings(), Path(tempfile.mkdtemp()), Loggers({}), {})


class Loop:
    """What one would write without a library: a module, torch.optim.SGD, a loop over clients and batches."""

    def __init__(self, work: Work, run: Engine) -> None:
        self.work, self.population = work, run.world.population
        net = next(iter(self.population.nets.values()))
        self.module = net.architecture.module(net.shape, net.classes)
        images = self.population.images
        # torch's default layout, as a DataLoader gives it; .contiguous() would keep one channel's channels last
        self.x = images.batch(torch.arange(len(images.labels))).clone(memory_format=torch.contiguous_format)
        self.y = images.labels
        self.w = [p.detach().clone() for p in self.module.parameters()]

    def round(self) -> None:
        total = [torch.zeros_like(w) for w in self.w]
        for client in range(self.work.clients):
            with torch.no_grad():
                for p, w in zip(self.module.parameters(), self.w, strict=True):
                    p.copy_(w)
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
            mine = torch.from_numpy(self.population.train[client])
            for rows in torch.split(mine[torch.randperm(len(mine))], self.work.batch):
                optimizer.zero_grad()
                logits = self.module(self.x[rows]).logits
                F.cross_entropy(logits, self.y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, self.module.parameters(), strict=True):
                    t.add_(p, alpha=1 / self.work.clients)
        self.w = total


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def training_share(run: Engine, state: State, rounds: int) -> float:
    """The part of a round's time that `Federation.train` takes."""
    inside = 0.0
    train = Federation.train

    def watched(*args, **kwargs):
        nonlocal inside
        began = time.perf_counter()
        result = train(*args, **kwargs)
        inside += time.perf_counter() - began
        return result

    Federation.train = watched  # type: ignore[method-assign]
    whole = sum(timed(lambda: run.advance(state)) for _ in range(rounds))
    Federation.train = train  # type: ignore[method-assign]
    return inside / whole


def matmul_rate() -> float:
    """Multiply-adds a second of a large matrix product."""
    a = torch.randn(1024, 1024)
    a @ a
    return 1024**3 / statistics.median(timed(lambda: a @ a) for _ in range(9))


def grid(rounds: int, executor: str) -> None:
    """PersFL's second stage: all students of all clients against one student a client, in turn."""
    world = engine(GRID, executor, validation=0.25).world
    one, many = PersFL(imitation=(0.5,), temperature=(5.0,)), PersFL(imitation=(0.1, 0.25, 0.5, 0.75, 1.0))
    (net,) = world.population.nets.values()
    fed = Federation(world, world.rounds, np.arange(GRID.clients), Ledger())
    teacher = fed.down(net.init(0), "model")
    for method in (one, many):
        method.distil(teacher, fed)  # warm up
    times = [[timed(lambda: method.distil(teacher, fed)) for method in (one, many)] for _ in range(rounds)]  # noqa: B023
    short, long = (statistics.median(side) for side in zip(*times, strict=True))
    print(f"persfl: {GRID.clients} clients x {len(many.points)} students {long:.3f} s, x 1 student {short:.3f} s: "
          f"{long / short:.2f} times")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=COMPARISONS, metavar="WORK", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--executor", default="auto")
    args = parser.parse_args()
    if unknown := set(args.works) - set(COMPARISONS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(COMPARISONS)}")
    rate = matmul_rate()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {2 * rate / 1e9:.0f} GFLOP/s by matrix product"
    )
    if "persfl" in args.works:
        grid(args.rounds, args.executor)
    if not (works := [name for name in args.works if name in WORKS]):
        return
    print(f"{'work':<6}{'loop/s':>10}{'fedkd/s':>10}{'ratio':>8}{'of matmul':>11}{'overhead':>10}")
    for name in works:
        work = WORKS[name]
        run = engine(work, args.executor)
        state, loop = run.start(), Loop(work, run)
        run.advance(state), loop.round()  # warm up
        times = [(timed(loop.round), timed(lambda: run.advance(state))) for _ in range(args.rounds)]  # noqa: B023
        slow, fast = (statistics.median(side) for side in zip(*times, strict=True))
        samples = work.clients * work.samples
        # a backward pass costs twice a forward pass, but the first layer needs no gradient of its input
        reached = 3 * work.flops * samples / fast / rate
        overhead = 1 - training_share(run, state, 3)
        cells = f"{samples / slow:>10,.0f}{samples / fast:>10,.0f}{slow / fast:>7.2f}x{reached:>10.0%}{overhead:>10.1%}"
        print(f"{name:<6}{cells}", flush=True)


if __name__ == "__main__":
    main()
