"""Exchanges are composed, not derived, and what is known of a batch in flight is few typed values."""

from __future__ import annotations

import ast
import itertools
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import colonnade.exchange
from colonnade import Batch
from colonnade.errors import ConfigError
from colonnade.exchange import OPENERS, open_exchange_part
from colonnade.exchange.bag_layout import BagsLookup
from colonnade.exchange.cached import CachedLookup
from colonnade.exchange.rows import RowsLookup
from colonnade.hops.kinds import (
    BY_TOWERS,
    EVALUATING,
    EXCHANGES,
    CachedHop,
    RowsHop,
    check_hops,
)
from colonnade.lookup.contract import BatchInfo, LookupContext, PartLookup

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
    for hops in EXCHANGES.values():
        check_hops(hops)
    assert set(BY_TOWERS) < set(EVALUATING) < set(EXCHANGES)


def test_each_kind_of_hop_has_a_function_that_opens_it():
    assert set(OPENERS) == {type(hop) for hops in EXCHANGES.values() for hop in hops}


def test_hops_that_are_no_exchange_are_refused():
    """Tuples of one or two hops: only the exchanges in the table open."""
    kinds = {hop for hops in EXCHANGES.values() for hop in hops}
    tuples = [(), *((hop,) for hop in kinds), *itertools.product(kinds, repeat=2)]
    invalid = [hops for hops in tuples if hops not in EXCHANGES.values()]
    assert len(invalid) == len(tuples) - len(EXCHANGES)
    invalid.append((CachedHop(RowsHop("tower")),))
    for hops in invalid:
        with pytest.raises(ConfigError, match="wanted those of an exchange"):
            open_exchange_part(hops, part=None)
