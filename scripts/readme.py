"""Renew the README's table of methods from the registry.

python scripts/readme.py            # rewrites README.md
"""

from dataclasses import fields
from importlib import import_module
from pathlib import Path

from fedkd.algorithms.base import ALGORITHMS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- methods: scripts/readme.py -->", "<!-- end of methods -->"


def table() -> str:
    rows = ["| `algorithm=` | what it is | paper | architectures | public data | hyperparameters |"]
    rows.append("|---|---|---|---|---|---|")
    for name, method in ALGORITHMS.items():
        title, cited, *_ = (import_module(method.__module__).__doc__ or "").split("\n\n")
        what = title.partition(": ")[2].rstrip(".")
        paper = "–" if cited.startswith(" ") else " ".join(cited.split()).partition('. "')[0].rstrip(".")
        own = ", ".join(f"`{f.name}={f.default}`" for f in fields(method)) or "–"
        mix, public = "one" if method.one_architecture else "any mix", "yes" if method.public_data else "–"
        rows.append(f"| `{name}` | {what} | {paper} | {mix} | {public} | {own} |")
    return "\n".join(rows)


def renewed(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
