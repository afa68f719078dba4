"""Suites sequences and graphs of bench own_data: the plain SASRec, the thin graph, and the ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import workers.own_graphs as graphs
import workers.own_sequences as bench
from harness import BenchError, Measured

from colonnade.batch import Ids


def test_newest_items_are_padded_behind():
    bags = Ids(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 3, 3, 4]))
    padded = bench.pad_newest(bags, torch.tensor([0, 1, 2]), 2)
    assert padded.tolist() == [[7, 8], [0, 0], [9, 0]]


@pytest.mark.parametrize("loss", ["softmax", "pairs"])
def test_the_plain_model_learns_what_follows_and_does_not_look_ahead(loss, tmp_path):
    torch.manual_seed(0)
    config = bench.open_config(tmp_path / "none", 0)
    model = bench.PlainSASRec(20, config)
    starts = torch.arange(60) % 20
    items = (starts[:, None] + torch.arange(5)) % 20  # item i + 1 follows item i
    bags = Ids(items.flatten().int(), torch.arange(61) * 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        bench.train_epoch(model, optimizer, bags, loss, 20)
    users = torch.arange(20)
    best = torch.from_numpy(bench.score_next(model, bags, users)).argmax(1)
    assert (best == (users + 5) % 20).sum() >= 12  # 1 by chance
    short, long = torch.tensor([[1, 2, 0, 0]]), torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model(short)[:, :2], model(long)[:, :2])


def test_a_thin_graph_has_three_triples_for_each_entity():
    random = np.random.RandomState(1)
    triples = random.randint(0, [9000, 9000, 20], (400_000, 3))
    thin = graphs.thin_triples(triples, 0)
    num_entities = len(np.unique(thin[:, :2]))
    assert num_entities <= graphs.NUM_ENTITIES and len(thin) / num_entities == pytest.approx(
        3, 0.01
    )
    assert not np.array_equal(thin, graphs.thin_triples(triples, 1))


def test_ratios_take_the_best_of_the_others():
    units = {"sasrec": (0.3, 20.0), "torch softmax": (0.25, 50.0), "torch pairs": (0.1, 10.0)}
    measured = [
        Measured(bench.CASE, system, unit, [value])
        for system, values in units.items()
        for unit, value in zip((bench.METRIC, "s"), values, strict=True)
    ]
    ratios = bench.compute_sequence_ratios(measured)
    assert ratios["sasrec_vs_torch_hr10"] == pytest.approx(1.2)
    assert ratios["sasrec_time_of_torch"] == pytest.approx(0.4)
    hits = {"default": [0.3, 0.4], "lr 1": [0.2, 0.2], "lr 2": [0.35, 0.45]}
    measured = [Measured(graphs.CASE, name, graphs.METRIC, x) for name, x in hits.items()]
    assert graphs.compute_graph_ratios(measured)["thin_graph_of_best"] == pytest.approx(0.35 / 0.4)
    assert bench.compute_sequence_ratios([]) == graphs.compute_graph_ratios([]) == {}


def test_absent_data_are_named(tmp_path):
    for measure in (bench.measure_sequences, graphs.measure_thin_graph):
        with pytest.raises(BenchError, match="is absent"):
            measure(tmp_path, 1)
