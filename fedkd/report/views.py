"""Pictures of what a method shows beside its accuracy: clusters by round, matrices as heat maps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkd.report.plots import COLOURS, figure_of, set_whole_ticks, title_axes


def draw_views(directory: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Each view of a run's views.jsonl as view_<name>.png."""
    names = dict.fromkeys(name for line in lines for name in line if name != "round")
    for name in names:
        seen = [(line["round"], line[name]) for line in lines if name in line]
        draw = {"clusters": _draw_clusters, "matrix": _draw_matrix}[seen[-1][1]["kind"]]
        draw(directory / f"view_{name}.png", name.replace("_", " "), seen)


def _draw_clusters(path: Path, name: str, seen: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Clients × rounds, one colour a number; −1 (nothing yet) stays white."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    rounds = [number for number, _ in seen]
    numbers = np.array([view["values"] for _, view in seen]).T
    kinds = np.unique(numbers[numbers >= 0]).astype(int)
    figure = figure_of(np.clip(0.25 * len(rounds), 4, 11) + 1.5, np.clip(0.2 * len(numbers), 2, 8) + 0.9)
    axes = figure.add_subplot()
    if len(kinds) <= len(COLOURS):
        place = np.full(int(kinds.max(initial=0)) + 1, -1)
        place[kinds] = np.arange(len(kinds))
        shown = np.where(numbers >= 0, place[np.maximum(numbers.astype(int), 0)], -1)
        colours = ListedColormap(["white", *COLOURS[: len(kinds)]])
        image = axes.pcolormesh(shown, cmap=colours, norm=BoundaryNorm(np.arange(-1.5, len(kinds)), colours.N))
        bar = figure.colorbar(image, ax=axes, ticks=range(len(kinds)), boundaries=np.arange(-0.5, len(kinds)))
        bar.ax.set_ylim(-0.5, len(kinds) - 0.5)
        bar.ax.set_yticklabels([str(kind) for kind in kinds])
    else:
        figure.colorbar(axes.pcolormesh(np.ma.masked_less(numbers, 0), cmap="viridis"), ax=axes)
    step = -(-len(rounds) // 12)
    axes.set_xticks(np.arange(0, len(rounds), step) + 0.5, [str(number) for number in rounds[::step]])
    set_whole_ticks(axes.yaxis)
    title_axes(axes, x="round", y=str(seen[-1][1]["rows"]), title=name, grid=False)
    figure.savefig(path)


def _draw_matrix(path: Path, name: str, seen: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """The last round's matrix."""
    number, view = seen[-1]
    values = np.array(view["values"])
    height, width = np.clip(0.25 * np.array(values.shape), 3, 9)
    figure = figure_of(width + 1.5, height + 0.9)
    axes = figure.add_subplot()
    figure.colorbar(axes.imshow(values, cmap="Blues", vmin=0 if values.min() >= 0 else None), ax=axes)
    set_whole_ticks(axes.xaxis)
    set_whole_ticks(axes.yaxis)
    title_axes(axes, x=str(view["columns"]), y=str(view["rows"]), title=f"{name}, round {number}", grid=False)
    figure.savefig(path)
