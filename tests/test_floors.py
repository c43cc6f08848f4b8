"""The floors of the house: imports go down only."""

import ast
from pathlib import Path
from typing import NamedTuple

import fedkd

# from the ground up; what stands in one row is on one floor, where nobody knows the others
FLOORS = (
    ("__version__",),
    ("core",),
    ("data", "models"),
    ("federation",),
    ("algorithms",),
    ("evaluate", "checkpoint", "logger", "table"),
    ("engine",),
    ("schema", "build", "report", "examples"),
    ("plan", "examples"),
    ("run", "watch"),
    ("cli",),
    ("__main__", "hydra_plugins"),
)
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}


class Import(NamedTuple):
    """One module that a file of the package imports, anywhere in it."""

    file: str
    module: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


ROOT = Path(fedkd.__file__).parent
PLUGINS = ROOT.parent / "hydra_plugins"  # above the package, as what is above it in the house


def imports() -> list[Import]:
    files = {file: file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py"))}
    files |= {file: file.relative_to(ROOT.parent) for file in sorted(PLUGINS.rglob("*.py"))}
    assert len(files) >= 60
    found = []
    for file, path in files.items():
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found += [Import(name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: relative imports hide where they lead"
                # `from fedkd import x` and `from fedkd.algorithms import x` may name modules
                found += [Import(name, f"{node.module}.{alias.name}") for alias in node.names]
    return found


IMPORTS = imports()
WITHIN = [Import(i.file, i.module.removeprefix("fedkd.")) for i in IMPORTS if i.package == "fedkd"]


def importers(library: str) -> set[str]:
    return {i.file for i in IMPORTS if i.package == library}


def test_imports_go_down_only():
    assert len(WITHIN) > 200
    crossing = [(i, FLOOR[i.file.split(".")[0]]) for i in WITHIN if i.package != i.file.split(".")[0]]
    assert [i for i, floor in crossing if FLOOR[i.package] >= floor] == []


def test_every_module_has_its_floor():
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} <= set(FLOOR)


def test_algorithms_do_not_import_one_another():
    among = [i for i in WITHIN if i.package == "algorithms" and i.file.startswith("algorithms.")]
    assert len({i.file for i in among}) >= 6
    shared = ("algorithms.base.", "algorithms.steps.", "algorithms.mixtures.")  # parts, which register no algorithm
    assert [i for i in among if not i.module.startswith(shared)] == []


def test_a_report_needs_no_more_than_a_run_s_files():
    assert {i.package for i in WITHIN if i.file.startswith("report.")} <= {"core", "logger", "table", "report"}


def test_only_the_way_from_the_command_to_the_config_knows_hydra():
    sweeper = {"hydra_plugins.fedkd.table_sweeper", "hydra_plugins.fedkd._table"}
    assert importers("hydra") == {"cli", "schema", *sweeper}
    # fedkd-report reads configs by the rules they were written by
    assert importers("omegaconf") == {"cli", "schema", "report.collect", *sweeper}


def test_what_hydra_imports_at_every_start_of_any_application_imports_little():
    """A file there whose name does not begin with _ is imported by every application of Hydra in the environment."""
    light = [file for file in PLUGINS.rglob("*.py") if not file.name.startswith("_")]
    assert len(light) == 1
    for file in light:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
        assert {str(name).split(".")[0] for name in names} <= {"sys", "dataclasses", "hydra", "omegaconf"}


def test_only_its_logger_knows_wandb_and_nobody_ray():
    assert importers("wandb") == {"logger.wandb"}
    assert importers("ray") == set()
