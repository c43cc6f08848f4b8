"""The plan of a run without training: the rounds are walked through on tensors that have shapes but no memory."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkd import build
from fedkd.algorithms.base import Algorithm
from fedkd.core import tree
from fedkd.core.optim import Adam, Local
from fedkd.federation import cohort
from fedkd.federation.executors import Vmapped
from fedkd.federation.executors.outline import Outline
from fedkd.federation.fed import Federation, World
from fedkd.federation.ledger import Ledger, Row
from fedkd.federation.population import Population
from fedkd.federation.store import Memory
from fedkd.federation.workers import Workers
from fedkd.logger.console import human, shown
from fedkd.models.net import Net

PATIENCE = 5.0  # seconds; a plan that would take longer extends the rounds it has seen to all of them


def plan(parts: build.Parts, config: build.Config, data: build.Data) -> dict[str, Any]:
    """What a run of this config will hold and send."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        world = build.world(parts, config, data)
        world = replace(world, executors={arch: Outline() for arch in world.population.nets}, workers=Workers(1))
        ledger, state, seen = _walk(parts, world)
    population = world.population
    m = len(population) if parts.algorithm.everyone else cohort.cohort_size(config["participation"], len(population))
    return {
        "algorithm": parts.algorithm.name,
        "rounds": world.rounds,
        "clients": {
            "count": len(population),
            "per_round": m,
            **{role: _spread(getattr(population, role).sizes) for role in ("train", "validation", "test")},
        },
        "public": None if population.public is None else len(population.public.labels),
        **models(parts.algorithm, population),
        "comm": _communication(ledger, seen, world.rounds, estimate=parts.algorithm.sent_by_data),
        "memory": _memory(world, config, state, m),
    }


def models(algorithm: Algorithm, population: Population) -> dict[str, Any]:
    """The clients' models, and the numbers a client holds while it trains one."""
    found = {
        name: {"params": net.params, "held": algorithm.held(net), "clients": int((population.member == i).sum())}
        for i, (name, net) in enumerate(population.nets.items())
    }
    return {"models": found}


def _walk(parts: build.Parts, world: World) -> tuple[Ledger, int, int]:
    """Rounds on fake tensors: the ledger, the bytes of a client's state, how many rounds were walked."""
    population, nets = world.population, list(world.population.nets.values())
    device = population.images.pixels.device
    server = tree.to(parts.algorithm.init_server(population.nets, 0), device)
    firsts = [tree.to(parts.algorithm.init_client(net, server, 0), device) for net in nets]
    store = Memory(population, lambda client: firsts[population.member[client]])
    participation = 1.0 if parts.algorithm.everyone else parts.settings.participation
    ledger, began, number = Ledger(), time.perf_counter(), 0
    crossed: dict[tuple[int, ...], list[Row]] = {}
    while number < world.rounds and (number < 3 or time.perf_counter() - began < PATIENCE):
        number += 1
        who = cohort.draw(population.train.sizes, participation, parts.settings.sampling, world.seed, number)
        # after the first, rounds with as many clients of each architecture are taken to send the same
        alike = (number == 1, *np.bincount(population.member[who], minlength=len(nets)).tolist())
        if alike not in crossed or parts.algorithm.sent_by_round:
            fed = Federation(world, number, who, Ledger())
            server, own = parts.algorithm.round(server, store.gather(who), fed)
            store.scatter(who, own)
            crossed[alike] = fed.crossed
        ledger.extend(row._replace(round=number) for row in crossed[alike])
    return ledger, max(map(_bytes, firsts)), number


def _communication(ledger: Ledger, seen: int, rounds: int, *, estimate: bool) -> dict[str, Any]:
    opening = Ledger(row for row in ledger.rows if row.round == 1)  # may hold what is sent but once: PerFed-CKT's start

    def over(count: int) -> dict[str, dict[str, int]]:
        """The rounds walked through, and the mean of those after the first for every further one."""
        return {way: {unit: extended(f"comm/{name}/{unit}", count) for unit in ("params", "bytes")}
                for way, name in (("unicast", "total"), ("broadcast", "broadcast"))}  # fmt: skip

    def extended(name: str, count: int) -> int:
        walked = ledger.totals[name]
        return round(walked + (count - seen) * (walked - opening.totals[name]) / max(seen - 1, 1))

    total = over(rounds)
    return {
        "per_round": {way: {unit: round(number / rounds) for unit, number in t.items()} for way, t in total.items()},
        "total": total,
        "exact": seen == rounds and not estimate,  # else rounds not walked through count as those after the first
        "estimate": estimate,  # the data decide how much is sent
        "by_kind": [{**kind, "params": round(kind["params"] / seen), "bytes": round(kind["bytes"] / seen)}
                    for kind in ledger.by_kind()],
    }  # fmt: skip


def _memory(world: World, config: build.Config, state: int, m: int) -> dict[str, int]:
    """Bytes, roughly: what lies in memory while a cohort trains."""
    population = world.population
    largest = max(population.nets.values(), key=lambda net: net.params)
    how = config["executor"]
    together = min(m, (how["chunk"] or m) if _vmapped(config, largest) else Workers(how["workers"]).count)
    batch = config["local"]["batch_size"] or int(population.train.sizes.max())
    kept = m if config["store"] == "disk" else len(population)
    return {
        "dataset": population.images.pixels.numel(),
        "client_states": state * kept,
        "training": 4 * largest.params * (m + together * (1 + _moments(world.local))),
        "activations": 2 * 4 * activations(largest) * batch * together,
    }


def _vmapped(config: build.Config, net: Net) -> bool:
    return isinstance(build.executor(config, net, build.device_of(config["device"])), Vmapped)


def _moments(local: Local) -> int:
    return 2 if isinstance(local.optimizer_at(local.lr), Adam) else int(local.momentum > 0)


def activations(net: Net) -> int:
    """Numbers a forward pass of one sample leaves behind for the backward pass."""
    total = 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal total
        if isinstance(output, torch.Tensor) and not list(module.children()):
            total += output.numel()

    module = net._layers.predicting.module
    hooks = [m.register_forward_hook(count) for m in module.modules()]
    module(torch.empty(1, *net.shape, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


def _bytes(state: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(state))


def _spread(sizes: np.ndarray) -> dict[str, float]:
    return {
        "total": int(sizes.sum()),
        "min": int(sizes.min()),
        "median": float(np.median(sizes)),
        "max": int(sizes.max()),
    }


def show(plan: Mapping[str, Any], directory: Path) -> None:
    """The plan for a person; every number to the last digit is in plan.json."""
    clients, comm, memory = plan["clients"], plan["comm"], plan["memory"]
    lines = [("clients", f"{clients['count']:,}, {clients['per_round']:,} a round")]
    for role in ("train", "validation", "test"):
        s = clients[role]
        if s["total"]:
            spread = f"{s['min']:,} to {s['max']:,} a client, median {s['median']:,.0f}"
            lines.append((role, f"{s['total']:,} samples: {spread}"))
    if plan["public"]:
        lines.append(("public", f"{plan['public']:,} unlabelled samples"))
    for name, model in plan["models"].items():
        lines.append(("model", f"{name}: {model['params']:,} parameters, {model['clients']:,} clients"))
    for way, told in (("unicast", "every copy"), ("broadcast", "each distinct message once")):
        once, whole = (
            f"{human(comm[span][way]['params'])} params, {human(comm[span][way]['bytes'], 'B')}"
            for span in ("per_round", "total")
        )
        lines.append((way, f"{once} a round; {whole} in all ({told})"))
    if comm["estimate"]:
        lines.append(("", "an estimate: the data decide how much is sent"))
    elif not comm["exact"]:
        lines.append(("", "the sums take further rounds to be as those after the first"))
    parts = ", ".join(f"{name.replace('_', ' ')} {human(size, 'B')}" for name, size in memory.items())
    lines.append(("memory", f"{human(sum(memory.values()), 'B')}: {parts}"))
    lines.append(("written to", shown(directory / "plan.json")))
    print(f"Plan: {plan['algorithm']}, {plan['rounds']} rounds, nothing is trained")
    print(*(f"  {key:<11}{text}" for key, text in lines), sep="\n")
