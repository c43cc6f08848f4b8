"""The command `fedkd-report`: one table and one picture over many runs."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedkd.core.errors import DataError, FedkdError
from fedkd.report import paper_formats
from fedkd.report.collect import SUMMARY, Run, collect, drop_reruns
from fedkd.report.curves import curves_by_task
from fedkd.report.formats import FORMATS
from fedkd.report.grid import to_text
from fedkd.report.page import page_of_paper, page_of_runs
from fedkd.report.paper import compare, is_table
from fedkd.report.paper_formats import main_grid
from fedkd.report.plots import draw_comparison
from fedkd.report.table import Table, build_table

PAGE = "report.html"
EXAMPLES = """\
examples:
  fedkd-report outputs                                          everything below outputs/
  fedkd-report outputs --best --metric acc/shared/global        the server's model at its best round
  fedkd-report outputs --by algorithm dataset                   pool over everything else
  fedkd-report outputs --html                                   a page with the table and curves to hover
  fedkd-report outputs/tables/cgpfl/table1/paper                a paper's table beside its runs
  fedkd-report outputs/a outputs/b --format latex --out tables  table.{txt,md,csv,tex} and curves.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the files; 1 where the runs cannot be compared as asked."""
    options = _parser().parse_args(argv)
    try:
        if all(map(is_table, options.folders)):
            for folder in options.folders:
                report_table(folder, options.out, options.format)
            return 0
        runs = choose_runs(options.folders, with_unfinished=options.unfinished)
        table = build_table(runs, options.metric, best_round=options.best, by=options.by)
        if options.out:
            write_report(table, options.out)
        if options.html:
            options.html.write_text(page_of_runs(table), encoding="utf-8")
            _tell(f"wrote {options.html}")
    except (FedkdError, OSError) as error:
        _tell(f"fedkd-report: {error}")
        return 1
    render, _ = FORMATS[options.format]
    print(render(table), end="")
    return 0


def choose_runs(folders: Iterable[Path], *, with_unfinished: bool = False) -> list[Run]:
    """The runs to compare; what is left out is said on stderr."""
    found = collect(folders)
    for path, problem in found.unreadable.items():
        _tell(f"left out, cannot be read: {path}: {problem}")
    started = [run for run in found.unfinished if run.metrics]
    empty = [run for run in found.unfinished if not run.metrics]
    if with_unfinished:
        _tell_paths("unfinished, taken as far as they got", started)
        _tell_paths("left out, no round evaluated yet", empty)
    else:
        _tell_paths(
            f"left out, unfinished (no {SUMMARY}; --unfinished takes them as far as they got)", found.unfinished
        )
    runs, superseded = drop_reruns([*found.finished, *(started if with_unfinished else [])])
    _tell_paths("left out, run again since with the same config and seed", superseded)
    if not runs:
        raise DataError("no run is left to report." + (" Try --unfinished." if started and not with_unfinished else ""))
    return runs


def report_table(folder: Path, out: Path | None = None, format: str = "text") -> None:
    """A paper's table beside ours: print it and write it in every format, beside its runs or to `out`."""
    shown, out = compare(folder), out or folder
    out.mkdir(parents=True, exist_ok=True)
    texts = {name: render(shown) for name, (render, _) in paper_formats.FORMATS.items()}
    for name, (_, file) in paper_formats.FORMATS.items():
        (out / file).write_text(texts[name], encoding="utf-8")
    (out / PAGE).write_text(page_of_paper(shown), encoding="utf-8")
    brief = to_text(main_grid(shown)) if format == "text" else texts[format]  # the costs are in the file
    print(brief, end="", flush=True)
    _tell(f"wrote {', '.join(file for _, file in paper_formats.FORMATS.values())} and {PAGE} to {out}")


def write_report(table: Table, folder: Path) -> None:
    """The table in every format, and the curves."""
    folder.mkdir(parents=True, exist_ok=True)
    for render, name in FORMATS.values():
        (folder / name).write_text(render(table), encoding="utf-8")
    draw_comparison(folder / "curves.png", curves_by_task(table), table.metric)
    _tell(f"wrote {', '.join(name for _, name in FORMATS.values())} and curves.png to {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedkd-report",
        description="One table over many runs: mean ± std over seeds, and what was communicated.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="a run, a sweep, a folder above them, or a paper's table"
    )
    parser.add_argument(
        "--metric", default="acc/personal/mean", help="sort by this metric of metrics.jsonl (default: %(default)s)"
    )
    moment = parser.add_mutually_exclusive_group()
    moment.add_argument("--last", dest="best", action="store_false", help="judge a run by its last round (the default)")
    moment.add_argument("--best", action="store_true", help="judge a run by its best round in that metric")
    parser.add_argument("--format", choices=FORMATS, default="text", help="what to print (default: %(default)s)")
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const=PAGE,
        type=Path,
        help="also write a page with curves to hover (%(const)s)",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="also write every format and curves.png there")
    parser.add_argument(
        "--by", metavar="KEY", nargs="+", help="group by these config keys instead of all that differ, e.g. algorithm"
    )
    parser.add_argument("--unfinished", action="store_true", help="take unfinished runs too, as far as they got")
    parser.set_defaults(best=False)
    return parser


def _tell_paths(what: str, runs: Sequence[Run]) -> None:
    if runs:
        _tell("\n".join([f"{what}:", *(f"  {run.path}" for run in runs)]))


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
