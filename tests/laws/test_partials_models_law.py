"""Models whose first operators are evaluated at the owners, weights and all: several ranks train, through the
trainer, what one rank trains; with clipping, accumulation and a step that is skipped. One number of ranks, the same
bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from test_partials_law import at_owners
from torch import nn

from colonnade import (
    SGD,
    Adam,
    EmbeddingCollection,
    Feature,
    FieldsLinear,
    Ids,
    Mesh,
    PlanConfig,
    Table,
    TargetAttention,
    Uniform,
    build_plan,
    fit,
)
from colonnade.data import Splits, open_tensors
from colonnade.models.dcn import DCN, DCNv2
from colonnade.models.linear import LR, NFM, DeepFM, WideDeep
from colonnade.models.split import Scorer
from colonnade.row_state import dense_state_dict
from colonnade.topology.sharding import table_wise

ROWS, DIM, NAMES = 30, 6, "abcd"


class Attending(Scorer):
    """Model that attends to `d`, a sequence, with `a`; and a first layer of the others."""

    def __init__(self, tables, features, *, num_dense):
        super().__init__()
        features = [*features[:-1], replace(features[-1], pooling="sequence")]
        consumers = {
            "likes": (TargetAttention(2), ("a", "d")),
            "first": (FieldsLinear([DIM] * 2, 3), ("b", "c")),
        }
        self.embeddings = EmbeddingCollection(tables, features, consumers=consumers)
        self.top = nn.Linear(DIM + 3 + num_dense, 1)

    def network(self, fields, dense):
        return self.top(torch.cat([fields["likes"], fields["first"].relu(), dense], 1))


KINDS = {
    "lr": (LR, {}, 1),
    "nfm": (NFM, {"top": [3]}, None),
    "wide_deep": (WideDeep, {"top": [3, 2]}, None),
    "deepfm": (DeepFM, {"top": [3]}, None),
    "dcn": (DCN, {"top": [3], "cross_layers": 2}, DIM),
    "dcnv2": (DCNv2, {"top": [3], "cross_layers": 2, "cross_rank": 2}, DIM),
    "narrow dcnv2": (DCNv2, {"top": [3], "cross_layers": 2, "cross_rank": 1}, DIM),
    "stacked dcnv2": (
        DCNv2, {"top": [3], "cross_layers": 2, "cross_rank": 1, "structure": "stacked"}, DIM,
    ),
    "attention": (Attending, {}, DIM),
}  # fmt: skip
"""Model, settings, dim of its tables; None: parts."""
AGAIN = "deepfm, whole tables"
RUNS = {
    "lr": {"dealt": True, "wanted": ("linear",)},
    "nfm": {"dealt": True, "wanted": ("pairs", "linear"), "dense_optimizer": "adam"},
    "wide_deep": {"dealt": True, "wanted": ("deep", "linear"), "accumulate": 4},
    "deepfm": {"dealt": True, "wanted": ("fm", "deep", "linear"), "dense_optimizer": "adam"},
    "deepfm, whole tables": {
        "wanted": ("fm", "deep", "linear"), "dense_clip_norm": 0.05, "embedding_clip_norm": 0.05,
    },
    "dcn": {"dealt": True, "wanted": ("first",), "dense_clip_norm": 0.1},
    "dcn, whole tables": {"wanted": ("first",), "dense_optimizer": "adam"},
    "dcnv2": {"dealt": True, "wanted": ("cross", "first"), "dense_clip_norm": 0.1},
    "narrow dcnv2, whole tables": {"wanted": ("cross", "first"), "dense_optimizer": "adam"},
    "stacked dcnv2": {"dealt": True, "wanted": ("cross",), "accumulate": 3},
    "attention": {"wanted": ("likes", "first"), "accumulate": 3, "dense_clip_norm": 0.1},
    "attention, a step is skipped": {
        "wanted": ("likes", "first"), "embedding_clip_norm": 0.05, "on_non_finite": "skip",
    },
    "dcn, a step is skipped": {"dealt": True, "wanted": ("first",), "on_non_finite": "skip"},
}  # fmt: skip


def source(is_poisoned: bool):
    """190 samples; the last feature has bags."""
    random = torch.Generator().manual_seed(4)
    ids = {name: Ids(torch.randint(0, ROWS, (190,), generator=random)) for name in NAMES}
    lengths = torch.randint(0, 4, (190,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids["d"] = Ids(torch.randint(0, ROWS, (int(offsets[-1]),), generator=random), offsets)
    dense = torch.rand(190, 2, generator=random)
    label = (torch.rand(190, generator=random) < 0.4).float()
    result = open_tensors(ids, dense=dense, label=label, cardinalities=dict.fromkeys(NAMES, ROWS))
    if is_poisoned:
        result.columns.dense[71] = float("nan")
    return result


def trained(mesh, name):
    """Rows, dense weights, metrics, steps that were skipped; and who was evaluated at the owners."""
    settings = dict(RUNS[name])
    is_split, wanted = settings.pop("dealt", False), settings.pop("wanted")
    make, model_settings, dim = KINDS[name.split(",")[0]]
    optimizers = {"deep": Adam(lr=0.01, eps=1e-3), "wide": SGD(lr=0.2)}
    tables = [
        Table(
            table,
            dim or {"deep": DIM, "wide": 1},
            rows=ROWS,
            optimizer=optimizers["deep"] if dim else optimizers,
            initializer=Uniform(scale=0.5),
            dtype="float64",
        )
        for table in NAMES
    ]
    features = [Feature(value, value, pooling="mean" if value == "d" else "sum") for value in NAMES]
    torch.manual_seed(3)
    model = make(tables, features, num_dense=2, **model_settings).double()
    shardings = {}
    if not is_split:  # others have no rows
        shardings = {t: table_wise(i % min(2, mesh.num_ranks)) for i, t in enumerate(NAMES)}
    plan = build_plan(
        tables,
        mesh.num_ranks,
        PlanConfig(tables=by_table(exchange=dict.fromkeys(NAMES, "partials"), sharding=shardings)),
    )
    model.embeddings.open(plan, mesh)
    chosen = at_owners(model.embeddings)
    if mesh.num_ranks > 1:
        assert chosen == wanted, (name, chosen)
    whole = source(False)
    result = fit(
        model,
        Splits(train=source("skipped" in name), test=whole),
        mesh=mesh,
        batch_size=48,
        epochs=1,
        dense_lr=0.05,
        **settings,
    )
    rows = {t.name: model.embeddings.rows(t.name, torch.arange(ROWS)) for t in tables}
    dense = dense_state_dict(model)
    assert any(bool(value.any()) for value in dense.values())
    return rows, dense, result.metrics, (result.outcome.steps, result.outcome.skipped)


HALVES = {
    "tables dealt": [n for n in RUNS if "dealt" in RUNS[n]],
    "whole": [n for n in RUNS if "dealt" not in RUNS[n]],
}


def train_half(mesh, half):
    """And one of them again."""
    results = {name: trained(mesh, name) for name in HALVES[half]}
    if AGAIN not in results:
        return results
    again, before = trained(mesh, AGAIN), results[AGAIN]
    for one, other in zip(again[:2], before[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert again[2] == before[2]
    return results


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@pytest.mark.parametrize("half", HALVES)
def test_ranks_train_what_one_rank_trains(num_ranks, half):
    one_rank = train_half(Mesh(), half)
    for runs in run_ranks(num_ranks, train_half, half):
        for name, (rows, dense, metrics, steps) in one_rank.items():
            close = {"rtol": 1e-10, "atol": 1e-12, "msg": lambda message, n=name: f"{n}: {message}"}
            torch.testing.assert_close(runs[name][0], rows, **close)
            torch.testing.assert_close(runs[name][1], dense, **close)
            assert runs[name][2] == pytest.approx(metrics, rel=1e-10)
            assert runs[name][3] == steps == (4, "skipped" in name)
