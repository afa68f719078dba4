"""Colonnade, as its user writes it: a model, a RowOptimizer for the tables, an ordinary optimizer for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import colonnade
import colonnade.embedding
from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
)
from colonnade.interaction import Concat
from colonnade.models.dcn import DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.models.linear import DeepFM
from colonnade.ops.interaction import pairwise_dot
from workers.loop import CROSS_LAYERS, Case, Laps, Step, build_part, serve


def build(case: Case) -> tuple[Step, dict[str, str]]:
    if "shipped_malloc" in case.options:
        colonnade.embedding.keep_freed_memory = lambda: None
    batches = list(read(case))
    if case.part in ("interaction", "products"):
        return build_network_part(case, batches[0]), {"colonnade": colonnade.__version__}
    if case.part == "embeddings":
        tables = tables_of(case, case.dim)
        return build_sparse(case, tables, batches), {"colonnade": colonnade.__version__}
    model = build_model(case, num_dense=batches[0].dense.shape[1])
    rows = RowOptimizer(model.embeddings)
    dense = torch.optim.Adam(model.parameters(), lr=case.dense_lr, fused=True)
    ready = model.embeddings.lookahead(batches)

    def step(laps: Laps) -> Tensor:
        batch = next(ready)
        laps("wait")
        dense.zero_grad()
        laps("dense")
        loss = bce(model(batch), batch.label)
        laps("forward")
        loss.backward()
        laps("backward")
        rows.step()
        laps("rows")
        dense.step()
        laps("dense")
        return loss

    return step, {"colonnade": colonnade.__version__}


def tables_of(case: Case, dim: int | dict[str, int], **settings: Any) -> list[Table]:
    optimizer = RowWiseAdagrad(lr=case.embedding_lr)
    return [
        Table(name, dim, rows=rows, optimizer=optimizer, **settings)
        for name, rows in zip(case.names, case.rows, strict=True)
    ]


def build_model(case: Case, num_dense: int) -> DLRM | DeepFM | DCNv2:
    features = [Feature(name, name) for name in case.names]
    if case.model == "deepfm":
        start = {"deep": Uniform(scale=case.dim**-0.5), "wide": Uniform(scale=0.0)}
        tables = tables_of(case, {"deep": case.dim, "wide": 1}, initializer=start)
        return DeepFM(tables, features, num_dense=num_dense, top=case.top, bags=())
    tables = tables_of(case, case.dim)
    if case.model == "dcnv2":
        return DCNv2(tables, features, num_dense=num_dense, cross_layers=CROSS_LAYERS, top=case.top)
    return DLRM(tables, features, num_dense=num_dense, bottom=case.bottom, top=case.top)


def build_sparse(case: Case, tables: list[Table], batches: list[Batch]) -> Step:
    """The embeddings alone, side by side in one tensor as the model takes them."""
    embeddings = EmbeddingCollection(
        tables,
        [Feature(name, name) for name in case.names],
        consumers={"fields": (Concat(), case.names)},
    )
    rows = RowOptimizer(embeddings)
    ready = embeddings.lookahead(batches)
    gradient = case.gradient(batches[0].size)

    def step(laps: Laps) -> Tensor:
        batch = next(ready)
        laps("wait")
        fields = embeddings(batch)["fields"]
        laps("forward")
        fields.backward(gradient)
        laps("backward")
        rows.step()
        laps("rows")
        return torch.zeros(())

    return step


def build_network_part(case: Case, batch: Batch) -> Step:
    """Build a part of the network as the model evaluates it; its tables are of one row."""
    model = build_model(replace(case, rows=[1] * len(case.rows)), num_dense=batch.dense.shape[1])
    assert isinstance(model, DLRM) and model.bottom is not None, "parts are of DLRM"

    def interact(vector: Tensor, fields: Tensor) -> Tensor:
        return pairwise_dot([vector, fields], dim=case.dim, included=[0])

    return build_part(case, model.bottom, interact, model.top)


def read(case: Case) -> Iterator[Batch]:
    dense, ids, label = case.load()
    for i in range(len(ids)):
        values = {name: Ids(ids[i, f]) for f, name in enumerate(case.names)}
        yield Batch(size=ids.shape[2], dense=dense[i], ids=values, label=label[i])


if __name__ == "__main__":
    serve(build)
