"""What is read off the source is what importing it gives."""

from dataclasses import MISSING, fields
from typing import get_type_hints

import pytest

from fedkd import schema
from fedkd.core.declared import dataclasses_in
from fedkd.core.optim import Local
from fedkd.data.datasets import Dataset
from fedkd.data.public import Public


def fields_of(cls):
    hints = get_type_hints(cls)
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return [(name, hints[name], default) for name, default in made.items()]


@pytest.mark.parametrize("group", ["algorithm", "partition", "model"])
def test_every_entry_is_declared_with_the_fields_it_has(group):
    declared, imported = schema.declarations()[group], schema.registries()[group]
    assert sorted(declared) == sorted(imported)
    assert len(declared) >= 9
    for name, cls in imported.items():
        assert fields_of(declared[name]) == fields_of(cls), name
    assert any(fields_of(cls) for cls in imported.values())


@pytest.mark.parametrize("cls", [Local, Dataset, Public])
def test_a_config_node_is_declared_with_the_fields_it_has(cls):
    declared = dataclasses_in(cls.__module__)[cls.__name__]
    assert declared is not cls
    assert fields_of(declared) == fields_of(cls) != []
