"""An architecture as pure functions of its parameters: init, forward, predict, features, stage, head."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedkd.core import tree
from fedkd.core.errors import ConfigError, unknown
from fedkd.core.factors import Beside, Factors
from fedkd.core.losses import Batch, Piece
from fedkd.core.optim import Weights
from fedkd.core.registry import Registry
from fedkd.core.tree import Params
from fedkd.core.unlocked import plain
from fedkd.models import chain, dense
from fedkd.models.layers import FASTER
from fedkd.models.lent import Layers, Lent
from fedkd.models.recorded import Recordings
from fedkd.models.split import Pass, Split
from fedkd.models.written import Tape, Written

Shape = tuple[int, int, int]  # channels, height, width
INITS = ("default", "zeros")
CHUNK = 512  # samples a prediction takes at once, so that memory does not grow with the data
CHUNK_OF_MAPS = 128  # ... by convolutions on a CPU, whose cache holds the maps of no more


@dataclass(frozen=True)
class Model(ABC):
    """An entry of the zoo: one `Architecture`, or several (`mixed`). Its fields are its config."""

    name: ClassVar[str]

    @abstractmethod
    def nets(self, shape: Shape, classes: int) -> dict[str, "Net"]:
        """The nets of the clients, by the names to show for them."""


@dataclass(frozen=True)
class Architecture(Model):
    """One network for every client.

    Parameters
    ----------
    init : `default` (the network's own) or `zeros` (for convex work: every run starts at the same point).
    projection : outputs of a two-layer MLP between features and head, as MOON has it (256), or None: no such layers.
        Its hidden layer is as wide as the features; what leaves it is then what counts as features everywhere.
    """

    init: str = "default"
    projection: int | None = None

    @abstractmethod
    def module(self, shape: Shape, classes: int) -> nn.Module:
        """The network for images of `shape`; a `Split`, or any module from images to logits."""

    def net(self, shape: Shape, classes: int) -> "Net":
        return Net(self, shape, classes)

    def nets(self, shape: Shape, classes: int) -> dict[str, "Net"]:
        return {self.name: self.net(shape, classes)}

    def problems(self) -> list[str]:
        """What is wrong with these fields, if anything."""
        found = [] if self.init in INITS else [unknown(f"model={self.name}: init", self.init, INITS)]
        return found + ([] if self.projection is None else not_positive(self, "projection"))


register = MODELS = Registry[Model]("model", "fedkd.models")


class Output(NamedTuple):
    """What a training pass gives: a `Pass`, and the running statistics after it."""

    logits: Tensor
    features: Tensor
    stage_in: Tensor
    stage_out: Tensor
    stats: dict[str, Tensor]


class Net:
    """One architecture for one image shape and number of classes; holds no parameters of its own."""

    def __init__(self, architecture: Architecture, shape: Shape, classes: int, name: str = "") -> None:
        self.architecture, self.shape, self.classes = architecture, shape, classes
        self.name = name or architecture.name
        if problems := architecture.problems():
            raise ConfigError(problems)
        try:
            with torch.device("meta"):
                self._layers = Layers(self._build())
            with self._layers.predicting.having(self._nothing()) as module:
                seen: Pass = module(torch.zeros(2, *shape))
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"model={self.name} does not fit images of {_size(shape)}: {str(error).splitlines()[0]}\n"
                "Choose another model (every dataset fits mlr and dnn) or a dataset with larger images."
            ) from error
        if (given := tuple(seen.logits.shape)) != (2, classes):
            raise ConfigError(f"model={self.name} gives outputs of shape {given} for 2 images; must be (2, {classes}).")
        module = self._layers.training.module
        self.feature_size = seen.features[0].numel()
        self.weights = {name: p.shape for name, p in module.named_parameters()}
        self.params = sum(shape.numel() for shape in self.weights.values())
        self.stats = {name: b.shape for name, b in module.named_buffers()}
        self.has_convolution = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
        self.batch_statistics = any(isinstance(m, _NormBase) for m in module.modules())
        self.draws = any(isinstance(m, nn.Dropout) for m in module.modules())  # at random, while it trains
        plain = module.projection is None
        self.dense = dense.of(module.features, module.head) if plain else None  # for stacked clients
        self.chain = chain.of(module) if self.has_convolution else None  # for one
        self._recordings = Recordings(self)
        # layers that hold parameters, first to last
        self.layers = list(dict.fromkeys(name.rpartition(".")[0] for name in self.weights))
        # layers that read the last stage's inner channels, and how many there are: what the layer before each puts out
        inner = [f"features.{name}" for name in module.inner]
        self.inner = {name: self.weights[f"{self._before(name)}.weight"][0] for name in inner}

    def _build(self) -> Split:
        given = self.architecture.module(self.shape, self.classes)
        module = given if isinstance(given, Split) else Split(given, nn.Identity())
        if self.architecture.projection is not None:
            module.project(self.architecture.projection)
        for layer in module.modules():
            layer.__class__ = FASTER.get(type(layer), type(layer))
            if isinstance(layer, _NormBase):
                layer.num_batches_tracked = None  # only needed without a momentum, and an integer cannot be averaged
        return module

    def _before(self, layer: str) -> str:
        return self.layers[self.layers.index(layer) - 1]

    def _nothing(self) -> dict[str, Tensor]:
        """All-zero parameters that take no memory.

        With them a pass finds the shapes; on meta tensors it would first import torch's compiler, for five seconds.
        """
        slots = self._layers.predicting.slots
        return {name: torch.zeros((), dtype=empty.dtype).expand(empty.shape) for _, _, name, empty in slots}

    def init(self, seed: int) -> Params:
        """Fresh parameters, a function of the seed alone."""
        if self._bounds is not None:
            weights, stats = _drawn(self.weights, self._bounds, seed), {}
        else:
            module = self._built(seed)
            weights = {name: p.detach() for name, p in module.named_parameters()}
            stats = {name: b.detach() for name, b in module.named_buffers()}
        return Params(tree.zeros_like(weights) if self.architecture.init == "zeros" else weights, stats)

    def _built(self, seed: int) -> Split:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs' generators as well
            return self._build()

    @cached_property
    def _bounds(self) -> list[float] | None:
        """Of the uniform numbers that a fully connected network's parameters are, if drawing them gives its own.

        It takes a fifth of the time that building it takes, for which a round waits while all its clients are new.
        """
        built = [p.detach() for p in self._built(0).parameters()] if self.dense is not None else []
        if not built or type(built[0]) is not Tensor:  # but one that has a shape only
            return None
        inputs = [self.weights[f"{name.rpartition('.')[0]}.weight"][1] for name in self.weights]
        bounds = [sqrt(3) * (sqrt(2 / (1 + sqrt(5) ** 2)) / sqrt(n)) if name.endswith("weight") else 1 / sqrt(n)
                  for name, n in zip(self.weights, inputs, strict=True)]  # fmt: skip
        pairs = zip(built, _drawn(self.weights, bounds, 0).values(), strict=True)
        return bounds if all(torch.equal(a, b) for a, b in pairs) else None

    def forward(self, model: Params, x: Tensor) -> Output:
        """A training pass: batch statistics are used, and the running ones updated in the output."""
        if self.chain is not None and torch.is_grad_enabled() and self.chain.serves(x):
            return Output(*self.chain.show(model.weights, x), {})
        stats = {name: value.clone() for name, value in model.stats.items()}
        with self._in_training(x).having({**model.weights, **stats}) as module:
            seen: Pass = module(x)
        return Output(*seen, stats)

    def _in_training(self, x: Tensor) -> Lent[Split]:
        alone = self.batch_statistics and len(x) == 1  # one sample has no variance: the running statistics serve
        return self._layers.predicting if alone else self._layers.training

    def cross_entropy(self, weights: Weights, batch: Batch) -> Factors | None:
        """The gradient of cross-entropy, for stacked clients or for one, if it is written out."""
        written = self._written(batch)
        return None if written is None else written.cross_entropy(weights, batch)

    def walk(
        self,
        weights: Weights,
        pieces: Iterable[Piece],
        rate: float,
        beside: Beside,
        loss: Callable[..., Any] | None = None,
        values: tree.Tree = (),
    ) -> bool:
        """Follow a gradient along a stream of stacked clients or of one, in place, if it can be done without Python.

        It is that of a loss that looks only at what passes show, given `values`; None: cross-entropy's.
        """
        name, shape = next(iter(self.weights.items()))
        written: Written | None = self.chain if weights[name].dim() == len(shape) else self.dense
        if written is None:
            return False
        slope = None
        if loss is not None:
            head = written.head(weights)
            slope = self._recordings.slope(loss, written, head, values) if head and plain(head[0]) else None
            if slope is None:
                return False
        with torch.set_grad_enabled(slope is not None):
            for piece in pieces:
                written.walk(weights, piece, rate, beside, slope, list(tree.leaves(values)))
        return True

    def gradient(self, loss: Callable[..., Any], model: Params, batch: Batch, *rest: Any) -> Factors | None:
        """That of a loss that looks only at what passes show (`fit.of_passes`)."""
        written = self._written(batch)
        if written is None:
            return None
        tape = Tape(self, written)
        with torch.enable_grad():
            value, _ = loss(tape, model, batch, *rest)
        return tape.gradient(value)

    def _written(self, batch: Batch) -> Written | None:
        if batch.y.dim() > 1:
            return self.dense
        return self.chain if self.chain is not None and self.chain.serves(batch.x) else None

    # stacked models of a fully connected net may be given to these three as they are

    def predict(self, model: Params, x: Tensor) -> Tensor:
        """Logits, by the running statistics."""
        return self._predicted(model, x, "logits")

    def features(self, model: Params, x: Tensor) -> Tensor:
        """What enters the head, by the running statistics."""
        return self._predicted(model, x, "features")

    def head(self, model: Params, features: Tensor) -> Tensor:
        """Logits of given features."""
        if self.dense is not None and self.dense.stacked(model.weights):
            return torch.baddbmm(model.weights["head.bias"].unsqueeze(-2), features, model.weights["head.weight"].mT)
        with self._layers.predicting.having(model.weights) as module:
            return module.head(features)  # type: ignore[no-any-return]

    def stage(self, model: Params, stage_in: Tensor) -> Tensor:
        """What the last stage makes of its input in a training pass; the running statistics after it are not kept."""
        stats = {name: value.clone() for name, value in model.stats.items()}
        with self._in_training(stage_in).having({**model.weights, **stats}) as module:
            _, stage, _ = module.parts
            return stage(stage_in)  # type: ignore[no-any-return]

    def narrow(self, model: Params, width: float) -> Params:
        """The model whose last stage has only the first `width` of its inner channels; its input and output stay.

        The others are neither made nor read; or, where a grouped convolution or the like makes them, read as zeros.
        Normalisation being by channel, this equals the stage built that narrow. What is left is scaled up to the
        whole, as dropout does: a normalisation after the layer undoes it; without one the narrow stage's output would
        be smaller for its width alone.
        """
        weights, stats = dict(model.weights), dict(model.stats)
        for layer, channels in self.inner.items():
            weight, kept = weights[f"{layer}.weight"], max(1, round(width * channels))
            read = kept * (weight.shape[1] // channels)
            if makers := self._makers(layer):
                weights[f"{layer}.weight"] = weight[:, :read] * (channels / kept)
                for part in (weights, stats):
                    part |= {name: leaf[:kept] for name, leaf in part.items() if name.rpartition(".")[0] in makers}
            else:
                mask = channels / kept * (torch.arange(weight.shape[1], device=weight.device) < read)
                weights[f"{layer}.weight"] = weight * mask.view(-1, *[1] * (weight.dim() - 2))
        return Params(weights, stats)

    def _makers(self, layer: str) -> list[str]:
        """The layers from the one that makes the channels that `layer` reads, if all of them can have fewer."""
        module, found = self._layers.training.module, [self._before(layer)]
        while isinstance(module.get_submodule(found[0]), _NormBase):
            found.insert(0, self._before(found[0]))
        made_by = module.get_submodule(found[0])
        separate = isinstance(made_by, nn.Linear | nn.modules.conv._ConvNd) and getattr(made_by, "groups", 1) == 1
        return found if separate else []

    def _predicted(self, model: Params, x: Tensor, output: str) -> Tensor:
        if self.dense is not None and self.dense.stacked(model.weights):
            if not tree.expanded(next(iter(model.weights.values()))):
                return getattr(self.dense.forward(model.weights, x)[0], output)  # type: ignore[no-any-return]
            one = self._predicted(tree.take(model, 0), x.flatten(0, 1), output)  # the same model at every client
            return one.view(*x.shape[:2], *one.shape[1:])
        with self._layers.predicting.having({**model.weights, **model.stats}) as module:
            chunk = CHUNK_OF_MAPS if self.has_convolution and x.device.type == "cpu" else CHUNK
            parts: list[Tensor] = [getattr(module(part), output) for part in torch.split(x, chunk)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, model: Params, last: int) -> tuple[Params, Params]:
        """The model without its last `last` layers, and those layers."""
        top = set(self.layers[len(self.layers) - last :])

        def part(of_top: bool) -> Params:
            return Params(*({k: v for k, v in d.items() if (k.rpartition(".")[0] in top) == of_top} for d in model))

        return part(False), part(True)

    def join(self, body: Params, top: Params) -> Params:
        """The inverse of `split`."""
        weights, stats = ({**b, **t} for b, t in zip(body, top, strict=True))
        return Params({k: weights[k] for k in self.weights}, {k: stats[k] for k in self.stats})


def _drawn(shapes: Mapping[str, torch.Size], bounds: Sequence[float], seed: int) -> Weights:
    draw, named = torch.Generator().manual_seed(seed), zip(shapes.items(), bounds, strict=True)
    return {name: torch.empty(shape).uniform_(-bound, bound, generator=draw) for (name, shape), bound in named}


def needs(shape: Shape, side: int) -> None:
    """Refuse images smaller than `side`, for modules to call; `Net` turns it into a sentence for the user."""
    if min(shape[1:]) < side:
        raise ValueError(f"it needs at least {side}x{side}.")


def not_positive(model: Model, *fields: str) -> list[str]:
    """A sentence for each of these fields that is not a number of 1 or more (or a list of them, as its default is)."""
    found = []
    for field in fields:
        value, default = getattr(model, field), getattr(type(model), field)
        numbers, kind = (value, "a list of numbers") if isinstance(default, tuple) else ((value,), "a number")
        if not (isinstance(numbers, tuple) and all(type(number) is int and number >= 1 for number in numbers)):
            shown = list(value) if isinstance(value, tuple) else value
            found.append(f"model={model.name}: {field}={shown} must be {kind} of at least 1.")
    return found


def _size(shape: Shape) -> str:
    return f"{shape[1]}x{shape[2]}, {shape[0]} channel{'s' if shape[0] > 1 else ''}"
