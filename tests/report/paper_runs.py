"""A paper's table with its run directories, written by hand."""

import csv
import json
from pathlib import Path
from typing import Any

from fedkd.table import Line, PaperTable

COMMIT = "0123456789abcdef"


def write_run(
    directory: Path, personal: float, shared: float | None = None, rounds: int = 2, sent: int = 1000, **summary: Any
) -> None:
    """A finished run whose models reach `personal` and `shared` in the last round, after a half as good one."""
    directory.mkdir(parents=True)
    final = {"acc/personal/mean": personal} | ({} if shared is None else {"acc/shared/mean": shared})
    lines = [
        {"round": number, "comm/total/params": sent * number, "comm/broadcast/params": sent * number // 2}
        | {name: value if number == rounds else value / 2 for name, value in final.items()}
        for number in range(1, rounds + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {f"last/{name}": value for name, value in lines[-1].items()}
    told |= {"time/total": 60.0, "models": {"mlr": {"params": 650, "held": 1300, "clients": 4}}, **summary}
    (directory / "summary.json").write_text(json.dumps(told))
    (directory / "versions.json").write_text(json.dumps({"commit": COMMIT}))
    spread = (-0.02, 0.0, 0.02)
    rows = [[i, 100 + i, personal + off, "" if shared is None else shared + off] for i, off in enumerate(spread)]
    _write_csv(directory / "clients.csv", ["client", "train", "acc_personal", "acc_shared"], rows)
    _write_csv(directory / "classes.csv", [0, 1], [[60, 40], [0, 101], [102, 0]])


def _write_csv(path: Path, header: list[Any], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_table(folder: Path) -> PaperTable:
    """Two columns and a cost, three rows of which two share their runs, two seeds."""
    table = PaperTable(
        "paper/table1",
        caption="Accuracy & <cost>",
        reference="Author et al., 2026, Table 1",
        seeds=[0, 1],
        departures=["The batch size is not told."],
        row={
            "local": Line("Local", ["algorithm=local"]),
            "ditto_gm": Line("Ditto (GM)", ["algorithm=ditto"], metric="acc/shared/mean"),
            "ditto_pm": Line("Ditto (PM)", ["algorithm=ditto"]),
        },
        column={
            "iid": Line("IID", ["partition=iid"]),
            "ds1": Line("DS-1", ["partition=ds1"]),
            "cost": Line("Cost", ["partition=iid"], metric="comm/broadcast/params", unit="thousand"),
        },
        paper={
            "local": {"iid": 70, "ds1": [90.25, 0.5]},
            "ditto_gm": {"iid": 80.5, "ds1": 60.5, "cost": 1.0},
            "ditto_pm": {"iid": 82.0, "ds1": 95.5, "cost": 1.0},
        },
    )
    table.save(folder)
    (folder / "command.json").write_text(json.dumps({"overrides": ["+table=paper/table1"]}))
    for seed in (0, 1):
        write_run(folder / f"local/iid/seed={seed}", 0.70 + 0.02 * seed, sent=0)
        write_run(folder / f"local/ds1/seed={seed}", 0.90, sent=0)
        write_run(folder / f"ditto_gm/iid/seed={seed}", 0.85, 0.80)
    write_run(folder / "ditto_gm/ds1/seed=0", 0.96, 0.60)
    return table
