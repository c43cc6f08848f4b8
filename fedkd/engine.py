"""The round loop: draw a cohort, run the algorithm's round, count, evaluate, log, checkpoint."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedkd import checkpoint
from fedkd.algorithms.base import Algorithm
from fedkd.core import tree
from fedkd.core.errors import Diverged, FedkdError
from fedkd.core.seeds import derive
from fedkd.core.signals import interruptible, shielded
from fedkd.evaluate import Evaluation, Sent, evaluate, judged_clients
from fedkd.federation import cohort
from fedkd.federation.fed import Federation, World
from fedkd.federation.ledger import Ledger
from fedkd.federation.store import Disk, Memory, Store
from fedkd.logger.base import Loggers

log = logging.getLogger("fedkd")


@dataclass(frozen=True)
class Settings:
    """How the loop runs; under these names in the config."""

    participation: float = 1.0
    sampling: str = "uniform"
    eval_every: int = 1
    eval_clients: int | None = None
    eval_sent: bool = False
    checkpoint_every: int | None = 10
    on_nan: str = "stop"
    store: str = "memory"


@dataclass
class State:
    """All that changes during a run; what a checkpoint holds."""

    round: int
    server: Any
    store: Store
    ledger: Ledger = field(default_factory=Ledger)
    logged: int = 0  # the last round whose evaluation is in the log
    dropped: frozenset[int] = frozenset()  # clients left out since their training diverged
    sent: Sent | None = None  # from a round on to its evaluation, where that wants it


@dataclass
class Engine:
    """One run."""

    algorithm: Algorithm
    world: World
    settings: Settings
    directory: Path
    loggers: Loggers
    config: Mapping[str, Any]  # goes into the checkpoint, so that a resume can be held to it

    def start(self) -> State:
        """The state before the first round, a function of the seed."""
        world, seed = self.world, derive(self.world.seed, "init")
        device, nets = world.population.images.pixels.device, world.population.nets
        server = tree.to(self.algorithm.init_server(nets, seed), device)
        names = list(nets)

        def first(client: int) -> Any:
            net = nets[names[world.population.member[client]]]
            return self.algorithm.init_client(net, server, derive(seed, "client", client))

        if self.settings.store == "disk":
            return State(0, server, Disk(world.population, first, self.directory / checkpoint.FOLDER / "clients"))
        return State(0, server, Memory(world.population, first))

    def resume(self, saved: Mapping[str, Any]) -> State:
        """The state a checkpoint holds."""
        state = self.start()
        state.round, state.logged, state.dropped = saved["round"], saved["logged"], frozenset(saved["dropped"])
        if saved.get("sent"):
            state.sent = Sent(**tree.to(saved["sent"], self.world.population.images.pixels.device))
        state.server = tree.to(saved["server"], self.world.population.images.pixels.device)
        state.ledger = Ledger(saved["ledger"])
        state.store.restore(saved["clients"])
        return state

    def run(self, state: State) -> Evaluation:
        """All rounds that are left; returns the last one's evaluation."""
        verdict = None
        with interruptible():
            try:
                began = time.perf_counter()
                while True:
                    trained = time.perf_counter()
                    if state.round > state.logged and self.is_due(state.round, self.settings.eval_every):
                        verdict = self.evaluate(state)
                        ended = time.perf_counter()
                        times = {"round": ended - began, "train": trained - began, "eval": ended - trained}
                        with shielded():
                            self.log(state, verdict, times)
                    if state.round and self.is_due(state.round, self.settings.checkpoint_every):
                        with shielded():
                            self.save(state)
                    if state.round == self.world.rounds:
                        break
                    began = time.perf_counter()
                    self.advance(state)
                    self.loggers.advance(state.round, state.ledger.totals)
            except BaseException:
                self.save(state)
                raise
        return verdict or self.evaluate(state)

    def is_due(self, round: int, every: int | None) -> bool:
        return round == self.world.rounds or (every is not None and round % every == 0)

    def evaluate(self, state: State) -> Evaluation:
        judged = judged_clients(self.settings.eval_clients, len(self.world.population), self.world.seed)
        return evaluate(self.algorithm, state.server, state.store, self.world, state.round, judged, state.sent)

    def log(self, state: State, verdict: Evaluation, times: Mapping[str, float]) -> None:
        seconds = {f"time/{name}": value for name, value in times.items()}
        self.loggers.log({"round": state.round, **verdict.metrics, **state.ledger.totals, **seconds})
        if verdict.views:
            self.loggers.show(state.round, verdict.views)
        state.logged, state.sent = state.round, None

    def advance(self, state: State) -> None:
        """One round. Its values replace the state's only when it is complete."""
        world, settings = self.world, self.settings
        number = state.round + 1
        participation = 1.0 if self.algorithm.everyone else settings.participation
        while True:
            if len(state.dropped) == len(world.population):
                raise FedkdError(f"training diverged at every client by round {number}; none is left to go on with.")
            who = cohort.draw(
                world.population.train.sizes, participation, settings.sampling, world.seed, number, state.dropped
            )
            fed = Federation(world, number, who, Ledger())
            try:
                server, own = self.algorithm.round(state.server, state.store.gather(who, keep=False), fed)
                break
            except Diverged as error:
                if settings.on_nan != "skip":
                    raise
                log.warning("round %d: client %s dropped, training diverged", number, error.clients)
                state.dropped |= set(error.clients)
        with shielded():
            state.store.scatter(who, own)
            state.round, state.server = number, server
            state.ledger.extend(fed.crossed)
            if settings.eval_sent and fed.sent is not None and self.is_due(number, settings.eval_every):
                state.sent = Sent(torch.from_numpy(who), fed.sent._stacks)
        if settings.eval_sent and fed.sent is None and number == 1:
            log.warning("round 1: eval.sent=true, but algorithm=%s sent no model to judge.", self.algorithm.name)

    def save(self, state: State) -> None:
        checkpoint.save(
            self.directory,
            {
                "round": state.round,
                "logged": state.logged,
                "server": state.server,
                "clients": state.store.snapshot(),
                "ledger": [list(row) for row in state.ledger.rows],
                "dropped": sorted(state.dropped),
                "sent": state.sent and state.sent._asdict(),
                "loggers": self.loggers.state(),
                "config": dict(self.config),
            },
        )
        state.store.saved()
