"""How well a model of a knowledge graph finds what a relation leads to: filtered ranks among all entities.

Legend: B samples, E entities.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.sets.triples import Known
from colonnade.errors import ConfigError, NonFiniteError
from colonnade.models.knowledge import KnowledgeGraph

HITS = (1, 3, 10)
CHUNK = 4096  # entities embedded, and ranked, at a time
QUERIES = 128


def filtered_ranks(scores: Tensor, truth: Tensor, known: Ids) -> Tensor:
    """scores (B, E), truth (B,) -> (B,) float64: the place of each truth, from 1, among all entities but others that
    are known to be true (Bordes et al. 2013). Equal scores share the mean of their places. Raises NonFiniteError."""
    if scores.numel() and bool(scores.amax().isnan()):  # one pass, as NaN is the greatest number
        raise NonFiniteError(
            "got NaN among the scores, wanted numbers: the model diverged; lower its learning rate"
        )
    assert known.offsets is not None
    wanted = scores.gather(1, truth[:, None])
    # int32: a third of the time of int64.
    above = (scores > wanted).sum(1, dtype=torch.int32).double()
    level = (scores == wanted).sum(1, dtype=torch.int32).double() - 1
    sample = torch.repeat_interleave(torch.arange(len(scores)), known.offsets.diff())
    others = known.values != truth[sample]
    sample, theirs = sample[others], scores[sample[others], known.values[others]]
    above -= torch.zeros_like(above).index_add_(0, sample, (theirs > wanted[sample, 0]).double())
    level -= torch.zeros_like(level).index_add_(0, sample, (theirs == wanted[sample, 0]).double())
    return above + 1 + level / 2


@torch.no_grad()
def evaluate_links(
    model: KnowledgeGraph, source: Source, batch_size: int, mesh: Mesh
) -> dict[str, float]:
    """Collective: both questions of each triple of one pass over `source`. Every rank returns the same means over
    questions, whatever the number of ranks. The model's training flag is put back."""
    num_entities = getattr(source, "num_entities", None)
    if num_entities is None:
        raise ConfigError(
            "this data set has no entities to rank; links are predicted on fb15k237, or a source with `num_entities` "
            "and batches whose key is `data.triples.Known`"
        )
    was_training = model.training
    model.eval()
    found = []
    try:
        chunks = torch.arange(num_entities).split(CHUNK)
        entities = torch.cat([model.entities(chunk) for chunk in chunks])
        for batch in source.batches(batch_size, rank=mesh.rank, num_ranks=mesh.num_ranks):
            links, known = model(batch), batch.key
            assert isinstance(known, Known)
            for queries, name, answers in (
                (links.toward_tail, "tail", known.tails),
                (links.toward_head, "head", known.heads),
            ):
                scores = torch.cat(
                    [
                        torch.cat([model.compare(some, part) for part in entities.split(CHUNK)], 1)
                        for some in queries.split(QUERIES)
                    ]
                    or [queries.new_empty(0, num_entities)]
                )
                found.append(filtered_ranks(scores.cpu(), batch.ids[name].values, answers))
    finally:
        model.train(was_training)
    ranks = torch.cat(found) if found else torch.empty(0, dtype=torch.float64)
    parts = mesh.all_gather_bytes("evaluate", ranks.numpy().tobytes())
    pooled = np.concatenate([np.frombuffer(part) for part in parts])
    # math.fsum: the same bits in whatever order they come.
    count = len(pooled) or math.nan
    means = {"mrr": math.fsum(1 / pooled) / count}
    means |= {f"hits@{k}": float((pooled <= k).sum()) / count for k in HITS}
    return {**means, "mean rank": math.fsum(pooled) / count, "num_samples": float(len(pooled))}
