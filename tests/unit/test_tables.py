"""Declarations that are accepted, and those that are refused before anything is built."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from types import MappingProxyType

import pytest
import torch

from colonnade import (
    SGD,
    Adam,
    EmbeddingCollection,
    Feature,
    RowWiseAdagrad,
    Table,
    Uniform,
    _native,
)
from colonnade.config.run import OPTIMIZER_SETTINGS
from colonnade.errors import ConfigError
from colonnade.optimizers import FTRL, SPARSE_OPTIMIZERS


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Table("", 2), "got name='', wanted text"),
        (lambda: Table("t", 0), "at least 1"),
        (lambda: Table("t", True), "at least 1"),
        (lambda: Table("t", {}), "at least one part"),
        (lambda: Table("t", {"a.b": 2}), "without a dot"),
        (lambda: Table("t", {"": 2}), "without a dot"),
        (lambda: Table("t", 2.0), "got dim=2.0, wanted at least 1"),
        (lambda: Table("t", 2, rows=9.0), "got rows=9.0, wanted 1 or more"),
        (lambda: Table("t", 2, master=1), "got master=1, wanted true or false"),
        (lambda: Table("t", 2, optimizer={"lr": 1.0}), "wanted SGD"),
        (lambda: Table("t", 2, admission={"probability": 0.5}), "wanted CountMinAdmission"),
        (lambda: Feature("f", 3), "feature 'f': got table=3, wanted text"),
        (lambda: Table("t", {"a": 2, "b": 0}), "got dim={'a': 2, 'b': 0}, wanted at least 1"),
        (lambda: Table("t", {"a": 2}, optimizer={"b": SGD(lr=1)}), r"\['a'\]"),
        (lambda: Table("t", {"a": 2}, initializer={"b": Uniform(scale=1)}), r"\['a'\]"),
        (lambda: Table("t", 2, optimizer="adam"), "SGD"),
        (lambda: Table("t", 2, rows=0), "open table"),
        (lambda: Table("t", 2, dtype="int8"), "bfloat16, float16, float32, float64"),
        (lambda: Table("t", 2, dtype="float16", master=True), "only a bfloat16"),
        (lambda: Table("t", 2, max_norm=0.0), "max_norm"),
        (lambda: Table("t", 2, weight_bound=-1.0), "weight_bound"),
        (lambda: Feature("f", "t", pooling="max"), "sum, mean, sequence, sqrtn"),
        (lambda: SGD(lr=-1), "lr=-1"),
        (lambda: SGD(lr=1, nesterov=True), "momentum"),
        (lambda: SGD(lr=1, momentum=1.0), "below 1"),
        (lambda: Adam(lr=1, betas=(0.9, 1.0)), "below 1"),
        (lambda: Adam(lr=1, betas=(0.9,)), "wanted two"),
        (lambda: Adam(lr=1, betas=0.9), "wanted two"),
        (lambda: Adam(lr=None), "lr=None, wanted a finite number"),
        (lambda: Adam(lr="0.1"), "lr='0.1', wanted a finite number"),
        (lambda: Adam(lr=10**400), "wanted a finite number"),
        (lambda: Table("t", 2**31, optimizer=SGD(lr=1)), "lower dim"),
        (lambda: Table("t", 4, optimizer=SGD(lr=1), max_norm="1"), "max_norm='1', wanted a number"),
        (lambda: Table(5, 4, optimizer=SGD(lr=1)), "got name=5, wanted text"),
        (lambda: FTRL(lr=0), "divides"),
        (lambda: RowWiseAdagrad(lr=float("inf")), "finite"),
    ],
)  # fmt: skip
def test_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_parts_lie_side_by_side():
    table = Table(
        "item",
        {"deep": 4, "wide": 1},
        optimizer={"deep": Adam(lr=1), "wide": RowWiseAdagrad(lr=2)},
        initializer={"deep": Uniform(scale=0.1), "wide": Uniform(scale=0.0)},
    )
    deep, wide = table.parts
    assert (deep.column, deep.dim, deep.state, deep.init_scale) == (0, 4, 0, 0.1)
    assert (wide.column, wide.dim, wide.state, wide.init_scale) == (4, 1, 8, 0.0)
    assert (table.width, table.state_floats, table.record_bytes) == (5, 9, 4 * 14 + 8)


@pytest.mark.parametrize(
    ("dtype", "master", "record_bytes"),
    [("float32", False, 4 * 5 + 8), ("float64", False, 8 * 5 + 8), ("bfloat16", False, 2 * 4 + 4 + 8),
     ("float16", False, 2 * 4 + 4 + 8), ("bfloat16", True, 4 * 5 + 8)],
)  # fmt: skip
def test_bytes_of_a_record(dtype, master, record_bytes):
    optimizer = RowWiseAdagrad(lr=1)
    table = Table("t", 4, optimizer=optimizer, dtype=dtype, master=master)
    assert table.record_bytes == record_bytes


def test_settings_of_optimizers_are_settings_of_a_run():
    names = {field.name for kind in SPARSE_OPTIMIZERS.values() for field in fields(kind)}
    assert names == {"lr", *OPTIMIZER_SETTINGS}


def test_names_of_optimizers():
    assert all(SPARSE_OPTIMIZERS[name].name == name for name in SPARSE_OPTIMIZERS)
    kernels = [kind(lr=1.0).kernel for kind in SPARSE_OPTIMIZERS.values()]
    assert sorted([*kernels, SGD(lr=1.0, momentum=0.5).kernel]) == sorted(_native.OPTIMIZERS)


def test_one_dtype_for_a_collection():
    tables = [Table("a", 2), Table("b", 2, dtype="bfloat16")]
    with pytest.raises(ConfigError, match="one EmbeddingCollection per dtype"):
        EmbeddingCollection(tables, [Feature("a", "a"), Feature("b", "b")])


def test_output_dtype_that_rows_cannot_give():
    with pytest.raises(ConfigError, match="output_dtype=float16 for tables of float64"):
        EmbeddingCollection(
            [Table("a", 2, dtype="float64")], [Feature("a", "a")], output_dtype=torch.float16
        )


def test_a_field_must_be_named_with_its_part():
    from colonnade import Concat

    with pytest.raises(ConfigError, match=r"a\.deep, a\.wide"):
        EmbeddingCollection(
            [Table("t", {"deep": 2, "wide": 1})],
            [Feature("a", "t")],
            consumers={"c": (Concat(), ["a"])},
        )


def test_parts_may_come_in_any_mapping():
    dims = {"deep": 4, "wide": 1}
    table = Table(
        "item", MappingProxyType(dims), initializer={"deep": None, "wide": Uniform(scale=1)}
    )
    assert table == Table("item", dims, initializer=table.initializer)


def test_values_are_frozen_and_travel():
    table = Table("item", 4, rows=9, optimizer=Adam(lr=1), max_norm=2)
    assert pickle.loads(pickle.dumps(table)) == table
    assert replace(table, rows=8).rows == 8 and replace(table, rows=9) == table
    assert len({table, replace(table)}) == 1
    with pytest.raises(ConfigError, match="table 'item': got rows=0"):
        replace(table, rows=0)
    with pytest.raises(FrozenInstanceError):
        table.rows = 8


def test_a_dtype_may_be_torchs():
    assert Table("a", 4, dtype=torch.bfloat16) == Table("a", 4, dtype="bfloat16")
