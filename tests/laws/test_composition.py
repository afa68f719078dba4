"""Exchanges are composed, not derived, and what is known of a batch in flight is few typed values."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import colonnade.exchange
from colonnade import Batch
from colonnade.exchange.bag_layout import BagsLookup
from colonnade.exchange.cached import CachedLookup
from colonnade.exchange.opening import TRANSPORTS
from colonnade.exchange.rows import RowsLookup
from colonnade.lookup.contract import BatchInfo, LookupContext, PartLookup
from colonnade.lookup.hops import BY_TOWERS, EVALUATING, EXCHANGES

MOST_FIELDS = 12


def test_no_exchange_inherits_from_another():
    folder = Path(colonnade.exchange.__file__).parent
    trees = [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    exchanges = {node.name for node in classes if node.name.endswith("Exchange")}
    assert {"Exchange", "RowsExchange", "BagsExchange", "CachedExchange"} <= exchanges
    for node in classes:
        assert not {ast.unparse(base) for base in node.bases} & exchanges, node.name


@pytest.mark.parametrize(
    "kind", [LookupContext, BatchInfo, PartLookup, RowsLookup, BagsLookup, CachedLookup]
)
def test_a_context_is_few_typed_values(kind):
    names = [field.name for field in fields(kind)]
    assert len(names) <= MOST_FIELDS
    assert all(str(hint) != "typing.Any" for hint in get_type_hints(kind).values())


def test_a_batch_carries_nothing_of_the_pipeline():
    """Beside what a reader hands over it has one number that losses divide by."""
    assert {field.name for field in fields(Batch)} == {
        "size", "dense", "ids", "label", "sample_weight", "group", "key", "position", "state", "next_use",
        "ends_epoch", "world_weight",
    }  # fmt: skip


def test_an_exchange_is_a_tuple_of_hops():
    for name, hops in EXCHANGES.items():
        assert [hop.group for hop in hops] in (["world"], ["peers", "tower"]), name
        assert all(hop.transport in TRANSPORTS for hop in hops), name
    assert set(BY_TOWERS) < set(EVALUATING) < set(EXCHANGES)
