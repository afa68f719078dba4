"""A small model with every kind of feature, and a way to train it anywhere: what the laws are checked on.

Everything follows from (seed, step, sample), so any rank of any world can make its own share of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from logs import open_test_log
from plans import by_table, cache_settings
from torch import Tensor, nn

from colonnade import (
    FM,
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AgeEviction,
    Batch,
    Concat,
    CountMinAdmission,
    EmbeddingCollection,
    Feature,
    Ids,
    MaxRowsEviction,
    Mesh,
    PlanConfig,
    RandomAdmission,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
    build_plan,
)
from colonnade.plan.names import CacheTier
from colonnade.row_state import dense_state_dict
from colonnade.store.contract import RowSources, TierCounts
from colonnade.store.shards import AbsentRows
from colonnade.store.table_shards import shard_tables
from colonnade.topology.sharding import Sharding, row_wise
from colonnade.train.dense import DenseGradients

DIM = 5


def tables(dtype: str = "float64", stays: str | None = None) -> list[Table]:
    adagrad = RowWiseAdagrad(lr=0.1, eps=1e-6, weight_decay=1e-3)
    adam = Adam(
        lr=0.01, eps=1e-3
    )  # a large eps: otherwise it amplifies the rounding of tiny gradients
    scale = Uniform(scale=0.5)
    user = {"deep": adagrad, "wide": FTRL(lr=0.1, l1=1e-4)}
    momentum = SGD(lr=0.1, momentum=0.9)
    declared = [
        Table(
            "user", {"deep": DIM, "wide": 1}, rows=53, optimizer=user, initializer=scale, dtype=dtype
        ),
        Table("item", DIM, optimizer=momentum, initializer=scale, dtype=dtype),
        Table("tag", DIM, rows=11, optimizer=adam, initializer=scale, dtype=dtype, max_norm=1.0, weight_bound=0.5),
        Table("wide", 3, optimizer=adagrad, initializer=scale, dtype=dtype),
    ]  # fmt: skip
    options = OTHERWISE[stays] if stays else {}
    return [replace(table, **options.get(table.name, {})) for table in declared]


SINGLE_WEIGHTS: dict[str, dict[str, Any]] = {
    "user": {
        "optimizer": {"deep": Adagrad(lr=0.1, eps=1e-6, weight_decay=1e-3), "wide": FTRL(lr=0.1)}
    },
    "tag": {"max_norm": None},
    "wide": {"optimizer": AdamW(lr=0.01, eps=1e-3)},
}
"""Features that leave every column of a row to itself, so that rows can be cut."""
STAYS: dict[str, dict[str, dict[str, Any]]] = {
    "counted and frequent": {
        "item": {
            "admission": CountMinAdmission(updates=2, expected_ids=100, error=0.1, halve_steps=3),
            "eviction": MaxRowsEviction(rows=20, by="frequency", halve_steps=4),
        },
        "wide": {"eviction": MaxRowsEviction(rows=9, by="norm")},
    },
    "by chance and recent": {
        "item": {"admission": RandomAdmission(probability=0.5), "eviction": AgeEviction(steps=2)},
        "wide": {"eviction": MaxRowsEviction(rows=9, by="recency")},
    },
}
"""Admission and eviction by name, by open table."""
OTHERWISE = {
    **STAYS,
    "single weights": SINGLE_WEIGHTS,
    "single weights that leave": {
        **SINGLE_WEIGHTS,
        "item": STAYS["counted and frequent"]["item"],
        "wide": {**SINGLE_WEIGHTS["wide"], "eviction": MaxRowsEviction(rows=9, by="recency")},
    },
}
"""Further settings that tables can be declared with."""


def features() -> list[Feature]:
    return [
        Feature("user", "user"),
        Feature("item", "item"),
        Feature("seen", "item", pooling="mean"),  # shares a table, multi-hot
        Feature("tags", "tag", pooling="sqrtn"),  # multi-hot, weighted, some bags empty
        Feature("history", "wide", pooling="sequence"),
    ]


class Net(nn.Module):
    """FM and values over the pooled fields, the mean of a sequence: every path into a loss."""

    def __init__(
        self,
        dtype: str = "float64",
        seed: int = 3,
        stays: str | None = None,
        over: Literal["fields", "ids"] = "fields",
    ) -> None:
        super().__init__()
        fields = ["user.deep", "item", "seen", "tags"]
        self.embeddings = EmbeddingCollection(
            tables(dtype, stays),
            features(),
            consumers={"fm": (FM(over), fields), "deep": (Concat(), fields[::-1])},
            seed=seed,
        )
        torch.manual_seed(seed)
        kind = getattr(torch, dtype)
        self.first = nn.Linear(4 * DIM, 6, dtype=kind)
        self.last = nn.Linear(6 + 3, 1, dtype=kind)

    def forward(self, batch: Batch) -> Tensor:
        result = self.embeddings(batch)
        sizes = batch.ids["history"].offsets.diff()
        samples = torch.arange(batch.size).repeat_interleave(sizes).to(result["history"].device)
        history = (
            result["history"].new_zeros(batch.size, 3).index_add(0, samples, result["history"])
        )
        deep = torch.tanh(self.first(result["deep"]))
        return self.last(torch.cat([deep, history], 1)) + result["fm"] + result["user.wide"]


def global_batch(step: int, size: int, *, num_items: int = 400) -> Batch:
    """Step `step`'s batch over all ranks. Skewed ids; items anywhere in 64 bits, both ends included."""
    random = torch.Generator().manual_seed(1000 + step)

    def draw(high: int, count: int) -> Tensor:
        return (torch.rand(count, generator=random) ** 3 * high).long()

    def bags(high: int, longest: int) -> tuple[Tensor, Tensor]:
        sizes = torch.randint(0, longest + 1, (size,), generator=random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return draw(high, int(offsets[-1])), offsets

    def item(ids: Tensor) -> Tensor:
        scattered = ids * 0x9E3779B97F4A7C1 - 77
        scattered[ids == 0] = 2**63 - 1
        scattered[ids == 1] = -(2**63)
        return scattered

    values, seen_offsets = bags(num_items, 4)
    tags, tag_offsets = bags(11, 3)
    history, history_offsets = bags(60, 5)
    return Batch(
        size,
        torch.zeros(size, 0),
        {
            "user": Ids(draw(53, size)),
            "item": Ids(item(draw(num_items, size))),
            "seen": Ids(item(values), seen_offsets),
            "tags": Ids(tags, tag_offsets, torch.rand(len(tags), generator=random)),
            "history": Ids(history, history_offsets),
        },
        label=(torch.rand(size, 1, generator=random) < 0.4).float(),
    )


def share_of(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """The rank-th contiguous block of the samples."""
    begin, end = batch.size * rank // num_ranks, batch.size * (rank + 1) // num_ranks
    ids = {}
    for name, feature in batch.ids.items():
        if feature.offsets is None:
            ids[name] = Ids(feature.values[begin:end])
            continue
        first, last = int(feature.offsets[begin]), int(feature.offsets[end])
        weights = None if feature.weights is None else feature.weights[first:last]
        offsets = feature.offsets[begin : end + 1] - first
        ids[name] = Ids(feature.values[first:last], offsets, weights)
    return Batch(end - begin, batch.dense[begin:end], ids, label=batch.label[begin:end])


@dataclass
class Trained:
    """Result of a training, in plain tensors: two runs that agree here agree everywhere."""

    losses: list[float]
    dense: dict[str, Tensor]
    rows: dict[str, Tensor]  # by table: weights of `probe_ids`
    clocks: dict[str, Tensor] = field(default_factory=dict)
    tiers: dict[str, TierCounts] = field(default_factory=dict)  # of this rank
    sources: RowSources = field(default_factory=RowSources)


def probe_ids() -> dict[str, Tensor]:
    """Every id that can occur."""
    items = torch.arange(400)
    scattered = items * 0x9E3779B97F4A7C1 - 77
    scattered[0], scattered[1] = 2**63 - 1, -(2**63)
    return {
        "user": torch.arange(53),
        "item": scattered,
        "tag": torch.arange(11),
        "wide": torch.arange(60),
    }


def open_backings(
    folder: Path, mesh: Mesh, tables: Sequence[Table], shardings: Sequence[Sharding] = ()
):
    """One file store per table, or slice of one, for this rank, empty; none where it has no rows of it."""
    return [
        AbsentRows(item.table.name, item.table.record_bytes)
        if item.sharding.shard_of(mesh.rank).owner_index is None
        else open_test_log(
            folder / f"{mesh.rank}-of-{mesh.num_ranks}" / item.table.name,
            table_name=item.table.name,
            record_bytes=item.table.record_bytes,
            identity=item.table.name,
            step=None,
        )
        for item in shard_tables(tables, shardings or [row_wise(mesh.num_ranks)] * len(tables))
    ]


def train(
    mesh: Mesh,
    *,
    steps: int = 6,
    size: int = 23,
    dtype: str = "float64",
    dram_bytes: int | None = None,
    mapped_bytes: int | None = None,
    hbm_bytes: int | None = None,
    device: str = "cpu",
    lookahead: int = 2,
    staleness: int = 0,
    late: Mapping[str, int] | None = None,
    folder: Path | None = None,
    evaluate_every: int = 0,
    sizes: Sequence[int] | None = None,
    stays: str | None = None,
    shardings: Mapping[str, Sharding] | None = None,
    exchanges: Mapping[str, str] | None = None,
    hot: Mapping[str, Any] | None = None,
    caches: Mapping[str, Any] | None = None,
    cache_tier: CacheTier = "dram",
    codec: Mapping[str, str] | None = None,
    over: Literal["fields", "ids"] = "fields",
) -> Trained:
    """Every rank calls it; every rank returns the same, on the CPU. Step t has `sizes[t]` (or `size`) samples."""
    model = Net(dtype, stays=stays, over=over).to(device)
    collection = model.embeddings
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(
            memory={
                "dram": dram_bytes,
                "mapped": f"{folder}/mapped:{mapped_bytes}" if mapped_bytes else None,
                "hbm": hbm_bytes,
            },
            lookahead=lookahead,
            staleness_steps=staleness,
            cache=cache_settings(caches, cache_tier),
            codec=dict(codec or {}),
            tables=by_table(
                staleness_steps=late, sharding=shardings, exchange=exchanges, replicated_rows=hot
            ),
        ),
    )
    backings = (
        [] if folder is None else open_backings(folder, mesh, collection.tables, plan.shardings)
    )
    collection.open(plan, mesh, backings=backings)
    rows = RowOptimizer(collection)
    dense = DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = sizes or [size] * steps
    batches = collection.lookahead(
        share_of(global_batch(t, n), mesh.rank, mesh.num_ranks) for t, n in enumerate(wanted)
    )
    losses = []
    for t, batch in enumerate(batches):
        dense.zero_gradients()
        loss = loss_of(model, batch)
        loss.backward()
        finite, _, _ = dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        assert finite
        rows.step(agreed=True)
        optimizer.step()
        losses.append(float(mesh.all_reduce("control", loss.detach().cpu().clone())))
        if evaluate_every and t % evaluate_every == 0:
            model.eval()
            with torch.no_grad():
                loss_of(model, share_of(global_batch(999, 31), mesh.rank, mesh.num_ranks))
            model.train()
    result = Trained(
        losses,
        {k: v.cpu().clone() for k, v in dense_state_dict(model).items()},
        all_rows(collection),
        tiers=collection.store.count_tiers(),
        sources=collection.store.sources,
    )
    for backing in backings:
        backing.close()
    return result


def loss_of(model: Net, batch: Batch) -> Tensor:
    """Compute this rank's part of the mean over the global batch."""
    logits = model(batch)
    total = nn.functional.binary_cross_entropy_with_logits(
        logits, batch.label.to(logits.device, logits.dtype), reduction="sum"
    )
    return total / max(batch.world_weight, 1e-12)


def all_rows(collection: EmbeddingCollection) -> dict[str, Tensor]:
    """Read the weights of `probe_ids` from their owners. Collective."""
    return {t.name: collection.rows(t.name, probe_ids()[t.name]) for t in collection.tables}


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    for name, value in one.dense.items():
        assert torch.equal(value, other.dense[name]), f"dense {name} differs"
    for name, value in one.rows.items():
        assert torch.equal(value, other.rows[name]), f"rows of {name} differ"


def assert_close(one: Trained, other: Trained, rtol: float) -> None:
    torch.testing.assert_close(
        torch.tensor(one.losses), torch.tensor(other.losses), rtol=rtol, atol=1e-12
    )
    for name, value in one.dense.items():
        torch.testing.assert_close(value, other.dense[name], rtol=rtol, atol=1e-12)
    for name, value in one.rows.items():
        torch.testing.assert_close(value, other.rows[name], rtol=rtol, atol=1e-12)
