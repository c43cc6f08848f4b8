"""The pictures say what the numbers say."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedkd.report.curves import Series, mean_curve
from fedkd.report.plots import DPI, LOOKS, Curve, draw_comparison, draw_curves, draw_partition


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved, to look inside."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures


def is_blank(path: Path) -> bool:
    return bool(imread(path).std() < 0.01)


def counts_of(clients: int, classes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 40, (clients, classes)) ** 2


def course(rounds: int, sent: float = 1000.0, **more: float) -> list[dict[str, float]]:
    """Rounds 1, 2, ... whose accuracy is 0.1, 0.2, ..."""
    return [
        {"round": r, "acc/personal/mean": r / 10, "acc/personal/std": 0.15, "comm/total/params": sent * r, **more}
        for r in range(1, rounds + 1)
    ]


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 10), (100, 10), (20, 100), (101, 10), (1000, 10)])
def test_a_split_of_any_size_gives_a_picture(tmp_path: Path, clients: int, classes: int) -> None:
    path = tmp_path / "partition.png"
    draw_partition(path, counts_of(clients, classes))
    height, width, _ = imread(path).shape
    assert not is_blank(path)
    assert width <= 14 * DPI
    assert height <= 9 * DPI


def test_the_area_of_a_dot_is_the_number_of_samples(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_partition(tmp_path / "partition.png", np.array([[100, 0], [25, 50]]))
    dots, *legend = drawn[0].axes[0].collections
    np.testing.assert_array_equal(dots.get_offsets(), [(0, 0), (1, 0), (1, 1)])  # (client, class); no dot for none
    largest, quarter, half = dots.get_sizes()
    assert largest / quarter == pytest.approx(4)  # 100 / 25
    assert largest / half == pytest.approx(2)  # 100 / 50
    assert legend[-1].get_sizes()[0] == pytest.approx(largest)  # its last example is 100 too


def test_a_single_sample_beside_thousands_is_still_seen(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_partition(tmp_path / "partition.png", np.array([[100_000, 1]]))
    assert drawn[0].axes[0].collections[0].get_sizes().min() > 1


def test_classes_are_named_as_they_stand(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_partition(tmp_path / "partition.png", counts_of(5, 3), classes=["$", "bag", "T-shirt_top"])
    assert [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()] == [r"\$", "bag", "T-shirt_top"]


def test_many_clients_become_a_heat_map_in_the_order_of_their_largest_class(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    counts = np.zeros((300, 3), dtype=int)
    counts[np.arange(300), np.arange(300) % 3] = 7  # client i holds class i mod 3 alone
    draw_partition(tmp_path / "partition.png", counts)
    axes = drawn[0].axes[0]
    shown = np.ma.filled(axes.images[0].get_array(), 0)
    np.testing.assert_array_equal(shown, 7 * np.repeat(np.eye(3, dtype=int), 100, axis=1))
    assert axes.get_title("left") == "300 clients, 3 classes, 2,100 samples · colour = samples"  # 300 · 7


def test_thousands_of_clients_are_thinned_and_the_title_says_so(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_partition(tmp_path / "partition.png", counts_of(2500, 10))
    axes = drawn[0].axes[0]
    assert axes.images[0].get_array().shape == (10, 834)  # every third of 2500: ⌈2500 / 3⌉
    assert "one client in 3 drawn" in axes.get_title("left")


def test_a_split_without_samples_does_not_fail(tmp_path: Path) -> None:
    draw_partition(tmp_path / "partition.png", np.zeros((5, 2), dtype=int))
    draw_partition(tmp_path / "heat.png", np.zeros((200, 2), dtype=int))


def test_a_run_is_drawn_by_round_and_by_communication(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = course(4, **{"acc/shared/mean": 0.3, "acc/shared/global": 0.2})
    draw_curves(tmp_path / "curves.png", metrics, "fedavg")
    by_round, by_sent = drawn[0].axes
    for axes, x in ((by_round, [1, 2, 3, 4]), (by_sent, [1000, 2000, 3000, 4000])):
        personal, shared, everywhere = axes.get_lines()
        np.testing.assert_array_equal(personal.get_xdata(), x)
        np.testing.assert_allclose(personal.get_ydata(), [0.1, 0.2, 0.3, 0.4])
        assert set(shared.get_ydata()) == {0.3}
        assert set(everywhere.get_ydata()) == {0.2}
    assert by_sent.get_xscale() == "log"
    assert len(drawn[0].legends[0].get_texts()) == 3


def test_the_band_is_the_spread_over_clients_within_what_an_accuracy_can_be(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw_curves(tmp_path / "curves.png", course(9), "local")
    (band,) = drawn[0].axes[0].collections
    edges = band.get_paths()[0].vertices
    at = {r: sorted({round(y, 6) for x, y in edges if x == r}) for r in (1, 5, 9)}
    assert at == {1: [0.0, 0.25], 5: [0.35, 0.65], 9: [0.75, 1.0]}  # r/10 ± 0.15, cut at 0 and 1


@pytest.mark.parametrize("keep_zeros", [True, False])
def test_a_method_that_sends_nothing_says_so(tmp_path: Path, drawn: list[Figure], keep_zeros: bool) -> None:
    metrics = course(3, sent=0.0)
    if not keep_zeros:
        metrics = [{key: value for key, value in line.items() if not key.startswith("comm/")} for line in metrics]
    draw_curves(tmp_path / "curves.png", metrics, "local")
    by_sent = drawn[0].axes[1]
    assert [text.get_text() for text in by_sent.texts] == ["nothing was communicated"]
    assert not by_sent.get_lines()


def test_numbers_that_were_not_finite_are_not_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics: list[dict[str, float | None]] = [*course(3)]
    metrics[1] = {**metrics[1], "acc/personal/mean": None, "acc/personal/std": None}
    draw_curves(tmp_path / "curves.png", metrics, "diverged")
    np.testing.assert_array_equal(drawn[0].axes[0].get_lines()[0].get_xdata(), [1, 3])


@pytest.mark.parametrize("rounds", [0, 1, 500])
def test_runs_of_any_length_give_a_picture(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "curves.png"
    draw_curves(path, course(rounds), "a lone $ is no formula")
    assert not is_blank(path)


def test_seeds_are_averaged_over_the_rounds_they_share_and_the_band_is_their_sample_deviation() -> None:
    def history(accuracies: list[float], sent: int) -> list[dict[str, float]]:
        return [
            {"round": i, "acc": accuracy, "comm/total/params": sent * i} for i, accuracy in enumerate(accuracies, 1)
        ]

    curve = mean_curve(Series("fedavg", "acc", [], [history([0.2, 0.4, 0.9], 100), history([0.4, 0.8], 200)]))
    np.testing.assert_array_equal(curve.round, [1, 2])  # the second run has no third round
    np.testing.assert_array_equal(curve.sent, [150, 300])  # (100 + 200) / 2, (200 + 400) / 2
    np.testing.assert_allclose(curve.mean, [0.3, 0.6])
    np.testing.assert_allclose(curve.std, [0.1 * np.sqrt(2), 0.2 * np.sqrt(2)])  # √(2 d² / 1) for ± d


def test_a_comparison_has_a_pair_of_panels_per_task_and_one_legend(tmp_path: Path, drawn: list[Figure]) -> None:
    rounds, accuracy = np.arange(1, 4), np.array([0.1, 0.2, 0.3])
    talks = Curve("fedavg", rounds, 10.0 * rounds, accuracy, accuracy / 10)
    silent = Curve("local", rounds, 0.0 * rounds, accuracy, None)
    draw_comparison(tmp_path / "curves.png", {"digits": [talks, silent], "mnist": [talks]}, "acc/personal/mean")
    assert len(drawn[0].axes) == 4
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["fedavg", "local"]
    _, level = drawn[0].axes[1].get_lines()
    assert level.get_linestyle() == ":"
    assert set(level.get_ydata()) == {0.3}  # where local ended


def test_a_curve_under_another_one_shows_through(tmp_path: Path, drawn: list[Figure]) -> None:
    one_model_for_all = [{**line, "acc/shared/mean": line["acc/personal/mean"]} for line in course(4)]
    draw_curves(tmp_path / "curves.png", one_model_for_all, "fedavg")
    below, above = drawn[0].axes[0].get_lines()
    assert (below.is_dashed(), above.is_dashed()) == (False, True)


def test_many_groups_are_all_told_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    one = np.array([1.0])
    draw_comparison(tmp_path / "curves.png", {"": [Curve(f"m{i}", one, one, one / 2, None) for i in range(25)]}, "acc")
    assert len(drawn[0].legends[0].get_texts()) == 25
    assert len({str(look) for look in LOOKS}) == 28  # 7 colours · 4 dashes, in turn


def test_drawing_leaves_no_global_state_and_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, numpy, pathlib; from fedkd.report.plots import draw_partition; "
        f"draw_partition(pathlib.Path({str(tmp_path / 'p.png')!r}), numpy.ones((5, 2), int)); "
        "sys.exit(' '.join({'torch', 'matplotlib.pyplot'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
