"""Models of knowledge graphs: what they give, what they learn, and filtered ranks among all entities.

Each makes of a head and a relation the vector that the tail should have, and of a tail and a relation that of the head,
so one comparison of vectors serves both questions and any number of candidates. With `reciprocal` "which head?" asks a
relation of its own, r back, for a tail (Lacroix et al. 2018): a relation's row is then two, side by side.

Legend: B samples, E entities, M candidates, P queries, D width of an entity's row.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from colonnade.batch import Batch, Ids
from colonnade.comm.collectives import gather
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.sets.triples import RELATION, Known
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.models.ranking import average_metrics, check_scores, evaluation_mode, mark_candidates
from colonnade.models.split import SplitModel
from colonnade.table import Feature, Table

FEATURES = ("head", "relation", "tail", "candidate")
LinkLoss = Literal["sigmoid", "softmax"]
HITS = (1, 3, 10)
CHUNK = 4096  # entities embedded, and ranked, at a time
QUERIES = 128


@dataclass(frozen=True, slots=True)
class Links:
    """What a batch of triples asks, and the rows that answer."""

    toward_tail: Tensor  # (B, D)
    toward_head: Tensor  # (B, D)
    tails: Tensor  # (B, D)
    heads: Tensor  # (B, D)
    candidates: Tensor  # (M, D)
    candidate_ids: Tensor  # (M,) int64, on the CPU
    weight: Tensor  # (B,) on the CPU
    penalty: Tensor  # (B,): what is added to the loss of each


class LinkPrediction:
    """Objective of a `KnowledgeGraph`: each true triple against wrong ones, whose head or tail is any candidate."""

    monitor = "mrr"
    metrics = ("mrr", *(f"hits@{k}" for k in HITS), "mean rank")

    def loss(self, model: KnowledgeGraph, batch: Batch, mesh: Mesh) -> Tensor:
        return link_loss(model, model(batch), batch.key, mesh)

    def check_source(self, source: Source) -> None:
        if getattr(source, "num_entities", None) is None:
            raise ConfigError(
                "this data set has no entities to rank; links are predicted on fb15k237, or a source with "
                "`num_entities` and batches whose key is `data.triples.Known`"
            )

    def evaluate(
        self, model: KnowledgeGraph, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Rank all entities for both questions of each triple; the metrics are means over questions."""
        self.check_source(source)
        chunks = torch.arange(source.num_entities).split(CHUNK)  # type: ignore[attr-defined]
        with evaluation_mode(model):
            entities = torch.cat([model.entities(chunk) for chunk in chunks])

            def measure(batch: Batch) -> dict[str, Tensor]:
                ranks = rank_answers(model, batch, entities)
                hits = {f"hits@{k}": ranks <= k for k in HITS}
                return {"mrr": 1 / ranks, **hits, "mean rank": ranks}

            return average_metrics(measure, self.metrics, source, batch_size, mesh)

    def predict(self, model: KnowledgeGraph, batch: Batch) -> Tensor:
        raise ConfigError(
            f"{type(model).__name__} gives no logits but vectors to rank entities by; use "
            "predictor.model(batch), predictor.model.entities(ids) and predictor.model.compare, or "
            "`colonnade evaluate`"
        )


class KnowledgeGraph(SplitModel):
    """Scores are `margin` less a distance, or products. Two tables, "entity" and "relation"; features head, tail and
    candidate read entities, candidate is a sequence."""

    objective = LinkPrediction()
    relation_share = 1.0
    """Width of a relation's row, of an entity's."""
    is_complex = False
    """Whether an entity's row is complex numbers, real parts first."""
    start = 9.0
    """Where `margin` is not given."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        margin: float | None = None,
        temperature: float = 1.0,
        loss: LinkLoss = "sigmoid",
        reciprocal: bool = False,
        penalty: float = 0.0,
        seed: int = 0,
    ) -> None:
        """loss: "sigmoid" says of each triple whether it is true; "softmax" which of all entities is the answer, of
        which the candidates are a sample, so that `margin` cancels (`link_loss` has both).
        temperature: scores are multiplied by it before the softmax; with "sigmoid" that is the softmax over wrong
        candidates' scores that says how much each of them counts, which is a constant of the loss (self-adversarial
        sampling, Sun et al. 2019). penalty: times `cubes`, it is added to a triple's loss, which holds a row back as
        often as it is in triples (N3, Lacroix et al. 2018). Raises ConfigError."""
        super().__init__()
        self.kind = type(self).__name__.lower()
        got = {f.name: (f.table, f.pooling) for f in features}
        wanted = {name: ("relation" if name == "relation" else "entity") for name in FEATURES}
        if {name: table for name, (table, _) in got.items()} != wanted or got["candidate"][
            1
        ] != "sequence":
            raise ConfigError(
                f"{self.kind}: got features {got}, wanted head, tail and the sequence candidate of table entity, and "
                "relation of its own; a source of triples has them (data.name=fb15k237)"
            )
        widths = {table.name: table.width for table in tables}
        share = self.row_width(RELATION, 1, {"reciprocal": reciprocal})
        if widths["relation"] != int(share * widths["entity"]) or (
            self.is_complex and widths["entity"] % 2
        ):
            raise ConfigError(
                f"{self.kind}: got rows of {widths['entity']} floats for entities and {widths['relation']} for "
                f"relations, wanted {'an even number' if self.is_complex else 'any'} and {share:g} of it"
            )
        if loss not in get_args(LinkLoss):
            raise ConfigError(f"{self.kind}: got loss={loss!r}, wanted sigmoid or softmax")
        if loss == "softmax" and margin is not None:
            raise ConfigError(
                f"{self.kind}: got margin={margin:g} beside loss=softmax, which asks by how much one score is above "
                "the others: what all have cancels; leave margin out, or set loss=sigmoid"
            )
        if not (penalty >= 0 and math.isfinite(penalty)):
            raise ConfigError(
                f"{self.kind}: got penalty={penalty}, wanted a finite number, 0 or more"
            )
        entity = next(table for table in tables if table.name == "entity")
        if loss == "softmax" and entity.rows is None:
            raise ConfigError(
                f"{self.kind}: got loss=softmax and an open table of entities, wanted to know how many there are, of "
                "which candidates are a sample; give Table('entity') rows, or set loss=sigmoid"
            )
        self.loss, self.num_entities, self.reciprocal = loss, entity.rows, reciprocal
        self.margin, self.temperature = self.start if margin is None else margin, temperature
        self.penalty = penalty
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        relation = next(table for table in tables if table.name == "relation")
        self.relation_range = float(getattr(relation.initializer, "scale", 0.0)) or 1.0
        # Of all scores: what they start from, learned, as nothing else dense is.
        self.offset = nn.Parameter(torch.zeros(()))

    @classmethod
    def row_width(cls, table: str, dim: int, settings: Mapping[str, Any]) -> float:
        if table != RELATION:
            return dim
        return dim * cls.relation_share * (2 if settings.get("reciprocal") else 1)

    def vectors(self, rows: Tensor) -> Tensor:
        """(n, D) rows of entities -> (n, D): their vectors."""
        return rows

    def cubes(self, heads: Tensor, there: Tensor, back: Tensor, tails: Tensor) -> Tensor:
        """(B, D) each; `there`, `back`: each question's relation -> (B,): the mean over both questions of the sum of
        the cubes of the sizes (of complex numbers: moduli) of the three vectors' numbers."""
        relations = (self._cubes(there) + self._cubes(back)) / 2
        return self._cubes(heads) + relations + self._cubes(tails)

    def _cubes(self, vectors: Tensor) -> Tensor:
        squares = vectors.square()
        if self.is_complex:
            squares = squares.unflatten(1, (2, -1)).sum(1)
        return squares.pow(1.5).sum(1)

    @abstractmethod
    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        """(B, D): the vector a tail is compared with."""

    @abstractmethod
    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        """(B, D): the vector a head is compared with."""

    @abstractmethod
    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """(P, D) each with each of (M, D) -> (P, M) scores without margin and offset."""

    @abstractmethod
    def compare_one(self, queries: Tensor, answers: Tensor) -> Tensor:
        """(P, D), (P, D) -> (P,): the diagonal of `compare`."""

    def network(
        self, queries: Tensor, answers: Tensor, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores (P,) of the answers (P, D), and (P, M) of candidates (M, D)."""
        start = self.margin + self.offset
        return self.compare_one(queries, answers) + start, self.compare(queries, candidates) + start

    def forward(self, batch: Batch) -> Links:
        rows = self.embeddings(batch)
        relation = rows["relation"]
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        heads, tails, candidates = (
            self.vectors(rows[name]) for name in FEATURES if name != "relation"
        )
        there, back = relation.chunk(2, 1) if self.reciprocal else (relation, relation)
        toward_tail = self.toward_tail(heads, there)
        toward_head = (self.toward_tail if self.reciprocal else self.toward_head)(tails, back)
        penalty = heads.new_zeros(batch.size)
        if self.penalty:
            penalty = self.penalty * self.cubes(heads, there, back, tails)
        ids = batch.ids["candidate"].values
        return Links(toward_tail, toward_head, tails, heads, candidates, ids, weight, penalty)

    def entities(self, ids: Tensor) -> Tensor:
        """(n,) -> (n, D); reads only."""
        batch = self.filled(Batch(len(ids), torch.empty(len(ids), 0), {"head": Ids(ids)}))
        return self.vectors(self.embeddings(batch)["head"])


def link_loss(model: KnowledgeGraph, links: Links, known: Known, mesh: Mesh) -> Tensor:
    """Compute this rank's part of the weighted mean over all ranks' triples. Collective, and its backward too.

    A triple's loss is the mean over both questions of what `model.loss` says, against all ranks' candidates that are
    not known to be true, and the penalty of the triple's own vectors.
    """
    candidates = gather(mesh, links.candidates)
    ids = gather(mesh, links.candidate_ids)
    total = mesh.all_reduce("dense", links.weight.sum(dtype=torch.float64))
    losses = []
    for queries, answers, true in (
        (links.toward_tail, links.tails, known.tails),
        (links.toward_head, links.heads, known.heads),
    ):
        right, wrong = model.run(queries, queries, answers, candidates)
        out = mark_candidates(true.samples, true.values, len(queries), ids).to(wrong.device)
        if model.loss == "sigmoid":
            losses.append(true_or_wrong(right, wrong, out, model.temperature))
        else:
            assert model.num_entities is not None
            all_wrong = (model.num_entities - true.counts).to(wrong)
            losses.append(which_of_all(right, wrong, out, all_wrong, model.temperature))
    triple_losses = (losses[0] + losses[1]) / 2 + links.penalty
    return (triple_losses * links.weight.to(triple_losses)).sum() / max(float(total), 1e-12)


def true_or_wrong(right: Tensor, wrong: Tensor, out: Tensor, temperature: float) -> Tensor:
    """Compute the loss of telling true triples from wrong ones (Sun et al. 2019, equations 5 and 6).

    Scores right (P,) and wrong (P, M), but those that are `out` -> (P,): the mean of -log sigmoid(right) and of
    -log sigmoid(-wrong), weighed by the softmax of the wrong ones.
    """
    share = (wrong.detach() * temperature).masked_fill(out, float("-inf")).softmax(1)
    share = share.nan_to_num()  # where no candidate is wrong
    return -(logsigmoid(right) + (share * logsigmoid(-wrong)).sum(1)) / 2


def which_of_all(
    right: Tensor, wrong: Tensor, out: Tensor, all_wrong: Tensor, temperature: float
) -> Tensor:
    """Compute the loss of finding the answer among all entities by sampled softmax (Bengio and Senecal 2003).

    Scores right (P,) and wrong (P, M), but those that are `out` -> (P,): -log of the answer's share in the softmax
    over it and all wrong entities, `all_wrong` (P,) in number. The wrong ones here are a sample of these, each standing
    for as many (of links: Ruffinelli et al. 2020).
    """
    drawn = (out.shape[1] - out.count_nonzero(1)).clamp(min=1)
    weight = (all_wrong / drawn).log()
    # One pass over the scores for each line; cross entropy has all of the softmax in two.
    others = torch.add(weight[:, None], wrong, alpha=temperature).masked_fill_(out, float("-inf"))
    logits = torch.cat([right[:, None] * temperature, others], 1)
    return cross_entropy(logits, torch.zeros_like(drawn), reduction="none")


def rank_answers(model: KnowledgeGraph, batch: Batch, entities: Tensor) -> Tensor:
    """Rank the true tails, then the true heads, of a batch among all entities (E, D): (2 B,) filtered ranks."""
    links, known = model(batch), batch.key
    ranks = []
    for queries, name, answers in (
        (links.toward_tail, "tail", known.tails),
        (links.toward_head, "head", known.heads),
    ):
        scores = [
            torch.cat([model.compare(query_chunk, chunk) for chunk in entities.split(CHUNK)], 1)
            for query_chunk in queries.split(QUERIES)
        ] or [queries.new_empty(0, len(entities))]
        ranks.append(filtered_ranks(torch.cat(scores).cpu(), batch.ids[name].values, answers))
    return torch.cat(ranks)


def filtered_ranks(scores: Tensor, truth: Tensor, known: Ids) -> Tensor:
    """Rank each truth among all entities but the others that are known to be true (Bordes et al. 2013).

    scores (B, E), truth (B,) -> (B,) float64 places, from 1; equal scores share the mean of their places.
    Raises NonFiniteError.
    """
    check_scores(scores)
    truth_scores = scores.gather(1, truth[:, None])
    # int32: a third of the time of int64.
    above = (scores > truth_scores).sum(1, dtype=torch.int32).double()
    level = (scores == truth_scores).sum(1, dtype=torch.int32).double() - 1
    sample = known.samples
    is_other = known.values != truth[sample]
    sample, other_scores = sample[is_other], scores[sample[is_other], known.values[is_other]]
    others_above = (other_scores > truth_scores[sample, 0]).double()
    others_level = (other_scores == truth_scores[sample, 0]).double()
    above -= torch.zeros_like(above).index_add_(0, sample, others_above)
    level -= torch.zeros_like(level).index_add_(0, sample, others_level)
    return above + 1 + level / 2
