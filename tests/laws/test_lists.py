"""A list of names is written once: other modules read it, or a test here compares the two."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
import torch

from colonnade import _native
from colonnade.cache.directory import POLICIES
from colonnade.config.model import ModelConfig
from colonnade.config.plan import CachePolicy, CodecName, ShardingChoice
from colonnade.data import SOURCES
from colonnade.models.build import MODEL_SPECS
from colonnade.ops import reference
from colonnade.table import ITEM_BYTES, POOLINGS, Pooling, RowDtype
from colonnade.topology.sharding import KINDS
from colonnade.wire.codec import CODECS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "colonnade"
TWICE = {frozenset(get_args(Pooling))}
"""Names that two modules write, because neither may import the other; compared below."""


def read_literals(path: Path):
    """Yield the texts of each `Literal[...]` of a file that has two or more."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            texts = [v.value for v in values if isinstance(v, ast.Constant)]
            if len(texts) > 1 and all(isinstance(text, str) for text in texts):
                yield frozenset(texts)


def test_no_literal_type_is_written_twice():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for texts in read_literals(path):
            places[texts].append(path.relative_to(SOURCE).as_posix())
    repeated = {texts: paths for texts, paths in places.items() if len(paths) > 1}
    assert {texts for texts in repeated if texts not in TWICE} == set(), repeated


@pytest.mark.parametrize(
    ("written", "declared"),
    [
        (CODECS, CodecName),
        (POLICIES, CachePolicy),
        ([*KINDS, "auto"], ShardingChoice),
        (POOLINGS, reference.Pooling),
        (ITEM_BYTES, RowDtype),
        (MODEL_SPECS, ModelConfig.model_fields["name"].annotation),
    ],
)
def test_tables_have_the_names_of_their_type(written, declared):
    assert sorted(written) == sorted(get_args(declared))


def test_the_native_core_has_the_same_codecs_and_policies():
    dims = torch.tensor([1], dtype=torch.int32)
    for name, codec in CODECS.items():
        coded = torch.zeros(1, codec.row_bytes([1], torch.float32), dtype=torch.uint8)
        if name != "exact":
            _native.decode_rows(name, coded, dims, torch.empty(1, 1))
    clock = _native.DirectoryClock(0, 0, 1.0, 0)
    for policy in POLICIES:
        _native.Directory(1, clock, policy)
    with pytest.raises(ValueError, match=", ".join(sorted(POLICIES))):
        _native.Directory(1, clock, "none")


def test_the_help_names_every_data_set(capsys, monkeypatch):
    from colonnade.cli.app import run_command

    monkeypatch.setenv("COLUMNS", "400")
    run_command(["train", "--help"])
    assert ", ".join(SOURCES) in capsys.readouterr().out
