"""The pictures: how the data is split, and how accuracy grows with rounds and with communication.

matplotlib is imported when something is drawn, and only as objects: no pyplot, no global state, no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Array: TypeAlias = NDArray[Any]

DPI = 150
INK, GRID = "#333333", "#e6e6e6"

# Okabe and Ito's palette, told apart by every kind of colour vision; its yellow is left out, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", (0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # a solid line, and three with gaps to see through
LOOKS = [{"color": colour, "linestyle": dash} for dash, colour in product(DASHES, COLOURS)]

MOST_DOTS = 100  # clients; beyond that dots are specks, and a heat map takes over
SMALLEST_CELL = 8  # points; the same, where there are many classes
MOST_COLUMNS = 1000  # clients; beyond that a column of the heat map is thinner than a pixel
MOST_NAMES = 30  # classes; beyond that their names would overlap
MOST_MARKERS = 30  # points of a line; beyond that markers hide it

SENT = "comm/total/params"
SINGLE_RUN = (  # metric, its deviation, label
    ("acc/personal/mean", "acc/personal/std", "personal (± std over clients)"),
    ("acc/shared/mean", None, "shared, clients' test samples"),
    ("acc/shared/global", None, "shared, global test set"),
)


class Curve(NamedTuple):
    """The course of one number."""

    label: str
    round: Array
    sent: Array  # parameters communicated until then
    mean: Array
    std: Array | None  # half the height of the band


def draw_partition(path: Path, counts: Array, *, classes: Sequence[str] | None = None) -> None:
    """Which client holds how many samples of which class: clients × classes dots, area = samples.

    Parameters
    ----------
    counts : [clients, classes], all the samples of each client.
    classes : names of the classes; None numbers them.
    """
    clients, kinds = counts.shape
    width, height = np.clip(0.3 * clients, 4, 12), np.clip(0.3 * kinds, 2.2, 8)
    figure = figure_of(width + 1.5, height + 0.9)
    axes = figure.add_subplot()
    title = f"{clients:,} clients, {kinds:,} classes, {int(counts.sum()):,} samples"
    cell = 72 * np.sqrt(width / clients * height / kinds)
    if clients <= MOST_DOTS and cell >= SMALLEST_CELL:
        title_axes(axes, x="client", y="class", title=title)
        _draw_dots(axes, counts, cell)
    else:
        step = -(-clients // MOST_COLUMNS)
        title += " · colour = samples" + (f", one client in {step} drawn" if step > 1 else "")
        title_axes(axes, x="clients, sorted by their largest class", y="class", title=title)
        _draw_heat_map(figure, axes, counts[::step])
    set_whole_ticks(axes.xaxis)
    set_whole_ticks(axes.yaxis)
    if kinds <= MOST_NAMES:
        axes.set_yticks(range(kinds), [_plain(name) for name in classes or map(str, range(kinds))])
    figure.savefig(path)


def draw_curves(path: Path, metrics: Sequence[Mapping[str, float | None]], title: str) -> None:
    """The course of one run: accuracy by round, and by what was communicated until then.

    Parameters
    ----------
    metrics : the lines of metrics.jsonl; None stands for a number that was not finite, and is not drawn.
    """
    curves = [_curve_of_one_run(metrics, *names) for names in SINGLE_RUN]
    # Where clients have no model of their own two curves coincide, and the dashed one must let the other through.
    looks = {curve.label: LOOKS[number * (len(COLOURS) + 1)] for number, curve in enumerate(curves)}
    _draw_pairs(path, {title: [curve for curve in curves if len(curve.round)]}, "acc/personal/mean", looks)


def draw_comparison(path: Path, tasks: Mapping[str, Sequence[Curve]], metric: str) -> None:
    """Curves of `metric` by round (left) and by communication (right), a pair of panels for each task."""
    labels = dict.fromkeys(curve.label for curve in chain.from_iterable(tasks.values()))
    _draw_pairs(path, tasks, metric, dict(zip(labels, cycle(LOOKS), strict=False)))


def _draw_pairs(path: Path, tasks: Mapping[str, Sequence[Curve]], metric: str, looks: Mapping[str, Any]) -> None:
    from matplotlib.ticker import PercentFormatter

    columns = max(1, int(9.5 / (0.6 + 0.075 * max(map(len, looks), default=1))))
    figure = figure_of(10, 3.4 * len(tasks) + 0.25 * -(-len(looks) // columns))
    grid = figure.subplots(len(tasks), 2, squeeze=False)
    for (title, shown), (by_round, by_sent) in zip(tasks.items(), grid, strict=True):
        by_sent.sharey(by_round)
        by_sent.tick_params(labelleft=False)
        for curve in shown:
            _draw_curve(by_round, curve.round, curve, metric, looks[curve.label])
        title_axes(by_round, x="round", y="accuracy" if _is_accuracy(metric) else metric, title=title)
        _draw_by_communication(by_sent, shown, metric, looks)
        set_whole_ticks(by_round.xaxis)
        if _is_accuracy(metric):
            by_round.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    handles = {handle.get_label(): handle for axes in grid[:, 0] for handle in axes.get_lines()}
    if handles:
        _legend(figure, list(handles.values()), list(handles), loc="outside lower center", ncols=columns)
    figure.savefig(path)


def _curve_of_one_run(
    metrics: Sequence[Mapping[str, float | None]], name: str, deviation: str | None, label: str
) -> Curve:
    lines = [line for line in metrics if line.get(name) is not None]

    def column(key: str) -> Array:
        return np.array([line.get(key) or 0.0 for line in lines])

    return Curve(label, column("round"), column(SENT), column(name), column(deviation) if deviation else None)


def _draw_by_communication(axes: Axes, curves: Sequence[Curve], metric: str, looks: Mapping[str, Any]) -> None:
    """Each curve over what was sent, on a log axis; what sends nothing has no place there but its level."""
    silent = [curve for curve in curves if not curve.sent.any()]
    title_axes(axes, x="parameters communicated", y="", title="")
    if len(silent) == len(curves):
        reason = "nothing was communicated" if curves else "nothing was measured"
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", color=INK)
        axes.set_xticks([])
        axes.grid(visible=False)
        return
    for curve in curves:
        if curve.sent.any():
            _draw_curve(axes, curve.sent, curve, metric, looks[curve.label])
        else:
            axes.axhline(curve.mean[-1], color=looks[curve.label]["color"], linestyle=":", linewidth=1.2)
    sent = np.concatenate([curve.sent for curve in curves])
    _log_axis(axes, sent[sent > 0])
    if silent:
        axes.set_xlabel("parameters communicated (dotted: sends nothing)")


def _draw_curve(axes: Axes, x: Array, curve: Curve, metric: str, look: Mapping[str, Any]) -> None:
    marker = "o" if len(x) <= MOST_MARKERS else ""
    axes.plot(x, curve.mean, label=_plain(curve.label), linewidth=1.6, marker=marker, markersize=3, **look)
    if curve.std is not None:
        low, high = curve.mean - curve.std, curve.mean + curve.std
        if _is_accuracy(metric):
            low, high = low.clip(0, 1), high.clip(0, 1)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _log_axis(axes: Axes, values: Array) -> None:
    """A log axis with ticks such as `200 k`, also where it spans less than a decade."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    decades = np.log10(values.max() / values.min())
    digits = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 2.0, 3.0, 5.0, 7.0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=digits))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_dots(axes: Axes, counts: Array, cell: float) -> None:
    """Dots whose area is the number of samples; the largest is about as wide as a cell, `cell` points."""
    clients, kinds = counts.shape
    widest = 0.95 * min(cell, 22)
    most = max(int(counts.max()), 1)

    def draw(client: Sequence[int] | Array, kind: Sequence[int] | Array, samples: Array) -> Any:
        # A single sample beside thousands would vanish, and then the picture would say there is none.
        area = np.maximum(widest**2 * samples / most, 1.5)
        return axes.scatter(client, kind, s=area, color=COLOURS[0], alpha=0.85, linewidths=0)

    client, kind = np.nonzero(counts)
    draw(client, kind, counts[client, kind])
    axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, kinds - 0.3))
    examples = _round_numbers_to(most)
    handles = [draw([], [], np.array([number])) for number in examples]
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "labelspacing": 0.8}
    _legend(axes, handles, [f"{number:,}" for number in examples], title="samples", **beside)


def _round_numbers_to(most: int) -> list[int]:
    """Up to three round numbers, the last one near `most`: 10, 100, 1000 or so."""
    numbers = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [number for number in numbers if number <= most][::-2][:3][::-1]


def _draw_heat_map(figure: Figure, axes: Axes, counts: Array) -> None:
    """Colours where dots would be specks; clients with the same largest class side by side, so that structure shows."""
    from matplotlib.colors import LogNorm

    order = np.lexsort((-counts.max(1), counts.argmax(1)))
    image = axes.imshow(
        np.ma.masked_equal(counts[order].T, 0),
        norm=LogNorm(1, max(int(counts.max()), 2)),
        cmap="viridis_r",
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, format="{x:,.0f}")
    bar.set_label("samples (white: none)", color=INK)
    bar.outline.set_visible(False)


def figure_of(width: float, height: float) -> Figure:
    """A picture of that many inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07))


def _legend(owner: Axes | Figure, handles: Sequence[Any], labels: Sequence[str], **where: Any) -> None:
    owner.legend(handles, labels, frameon=False, labelcolor=INK, fontsize=9, **where)


def title_axes(axes: Axes, *, x: str, y: str, title: str, grid: bool = True) -> None:
    """The looks that all pictures share."""
    axes.set_axisbelow(True)
    if grid:
        axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(_plain(y), color=INK)
    axes.set_title(_plain(title), color=INK, loc="left", fontsize=11)


def set_whole_ticks(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _is_accuracy(metric: str) -> bool:
    return metric.startswith("acc/")


def _plain(text: str) -> str:
    """Text that matplotlib takes as it stands: a dollar begins no formula."""
    return text.replace("$", r"\$")
