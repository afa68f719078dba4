"""Knowledge graph models for link prediction: base class, losses, and filtered ranks among all entities.

A model predicts the tail's vector from a head and a relation, and the head's from a tail and a relation, so one
comparison of vectors serves both questions and any number of candidates. With `reciprocal`, the question "which head?"
uses a relation of its own, the inverse of r, and predicts a tail (Lacroix et al. 2018). A relation's row is then two
vectors, concatenated.

Legend: B samples, E entities, M candidates, P queries, D width of an entity's row.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from colonnade.batch import Batch, Ids
from colonnade.comm.collectives import concatenate_over_ranks
from colonnade.comm.mesh import Mesh
from colonnade.config.model import LinkLoss
from colonnade.data.contract import Source
from colonnade.data.triples import RELATION, KnownAnswers
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.models.ranking import (
    average_metrics,
    check_scores,
    evaluation_mode,
    mark_matching_candidates,
)
from colonnade.models.split import SplitModel
from colonnade.table import Feature, Table

FEATURES = ("head", "relation", "tail", "candidate")
HITS = (1, 3, 10)
CHUNK = 4096  # entities embedded, and ranked, at a time
QUERIES = 128


@dataclass(frozen=True, slots=True)
class LinkBatch:
    """Query vectors of a batch of triples, and the vectors of its entities and candidates."""

    tail_queries: Tensor  # (B, D): vectors that tails are compared with
    head_queries: Tensor  # (B, D)
    tails: Tensor  # (B, D)
    heads: Tensor  # (B, D)
    candidates: Tensor  # (M, D)
    candidate_ids: Tensor  # (M,) int64, on the CPU
    weight: Tensor  # (B,) on the CPU
    penalty: Tensor  # (B,): added to each triple's loss


class LinkPredictionObjective:
    """Objective of a `KnowledgeGraph`: true triples against wrong ones with a candidate as head or tail."""

    monitor = "mrr"
    metrics = ("mrr", *(f"hits@{k}" for k in HITS), "mean rank")

    def loss(self, model: KnowledgeGraph, batch: Batch, mesh: Mesh) -> Tensor:
        return compute_link_loss(model, model(batch), batch.key, mesh)

    def check_source(self, source: Source) -> None:
        if getattr(source, "num_entities", None) is None:
            raise ConfigError(
                "this data set has no entities to rank; links are predicted on triples, fb15k237, or a source with "
                "`num_entities` and batches whose key is `data.triples.KnownAnswers`"
            )

    def evaluate(
        self, model: KnowledgeGraph, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Rank all entities for both questions of each triple; the metrics are means over questions."""
        self.check_source(source)
        with evaluation_mode(model):
            entities = model.embed_entities(source.num_entities)  # type: ignore[attr-defined]

            def measure(batch: Batch) -> dict[str, Tensor]:
                ranks = rank_true_answers(model, batch, entities)
                hits = {f"hits@{k}": ranks <= k for k in HITS}
                return {"mrr": 1 / ranks, **hits, "mean rank": ranks}

            def identify(batch: Batch) -> list[Ids]:
                return [batch.ids[name] for name in ("head", "relation", "tail")]

            return average_metrics(
                measure, self.metrics, source, batch_size, mesh, identify=identify
            )

    def predict(self, model: KnowledgeGraph, batch: Batch) -> Tensor:
        raise ConfigError(
            f"{type(model).__name__} gives no logits but vectors to rank entities by; use "
            "colonnade.rank_answers, predictor.model(batch) with predictor.model.entities(ids) and "
            "predictor.model.compare, or `colonnade evaluate`"
        )


class KnowledgeGraph(SplitModel):
    """Knowledge graph model that scores triples by `margin` minus a distance, or by products.

    It has two tables, "entity" and "relation". The features head, tail and candidate read entities; candidate is a
    sequence.
    """

    objective = LinkPredictionObjective()
    relation_share = 1.0
    """Width of a relation's row relative to an entity's."""
    is_complex = False
    """True if an entity's row has complex elements, real parts first."""
    default_margin = 9.0
    """Default of `margin`."""

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
        """Create the model.

        loss: "sigmoid" classifies each triple as true or wrong; "softmax" classifies which of all entities is the
        answer, with the candidates as a sample of them, so `margin` cancels (`compute_link_loss` has both).
        temperature: factor of scores before the softmax. With "sigmoid" that softmax is over the wrong candidates'
        scores and weighs them; it is a constant of the loss (self-adversarial sampling, Sun et al. 2019).
        penalty: factor of `cubic_norms`, added to a triple's loss. A row is so regularised as often as it occurs in
        triples (N3, Lacroix et al. 2018). Raises ConfigError.
        """
        super().__init__()
        self.kind = type(self).__name__.lower()
        got = {f.name: (f.table, f.pooling) for f in features}
        wanted = {name: ("relation" if name == "relation" else "entity") for name in FEATURES}
        if {name: table for name, (table, _) in got.items()} != wanted or got["candidate"][
            1
        ] != "sequence":
            raise ConfigError(
                f"{self.kind}: got features {got}, wanted head, tail and the sequence candidate of table entity, and "
                "relation of its own; a source of triples has them (data.name=triples)"
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
                f"{self.kind}: got margin={margin:g} with loss=softmax, which depends only on differences of scores: "
                "the margin cancels; leave margin out, or set loss=sigmoid"
            )
        if not (penalty >= 0 and math.isfinite(penalty)):
            raise ConfigError(
                f"{self.kind}: got penalty={penalty}, wanted a finite number, 0 or more"
            )
        entity = next(table for table in tables if table.name == "entity")
        if loss == "softmax" and entity.rows is None:
            raise ConfigError(
                f"{self.kind}: got loss=softmax and an open table of entities, wanted their number, since candidates "
                "are a sample of them; give Table('entity') rows, or set loss=sigmoid"
            )
        self.loss = loss
        self.num_entities = entity.rows
        self.reciprocal = reciprocal
        self.margin = self.default_margin if margin is None else margin
        self.temperature = temperature
        self.penalty = penalty
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        relation = next(table for table in tables if table.name == "relation")
        self.relation_range = float(getattr(relation.initializer, "scale", 0.0)) or 1.0
        # Learned constant of all scores: the only dense weight.
        self.offset = nn.Parameter(torch.zeros(()))

    @classmethod
    def row_width(cls, table: str, dim: int, settings: Mapping[str, Any]) -> float:
        if table != RELATION:
            return dim
        return dim * cls.relation_share * (2 if settings.get("reciprocal") else 1)

    def vectors(self, rows: Tensor) -> Tensor:
        """Return entities' vectors from their rows: (n, D) -> (n, D)."""
        return rows

    def cubic_norms(
        self, heads: Tensor, relations: Tensor, inverse_relations: Tensor, tails: Tensor
    ) -> Tensor:
        """Sum the cubes of the absolute elements (complex: moduli) of each triple's vectors: (B, D) each -> (B,).

        `relations` belong to the question for the tail, `inverse_relations` to that for the head. The result is the
        mean over both questions.
        """
        relation_norms = (self._cubic_norms(relations) + self._cubic_norms(inverse_relations)) / 2
        return self._cubic_norms(heads) + relation_norms + self._cubic_norms(tails)

    def _cubic_norms(self, vectors: Tensor) -> Tensor:
        squares = vectors.square()
        if self.is_complex:
            squares = squares.unflatten(1, (2, -1)).sum(1)
        return squares.pow(1.5).sum(1)

    @abstractmethod
    def predict_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        """Predict the vectors that tails are compared with, (B, D)."""

    @abstractmethod
    def predict_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        """Predict the vectors that heads are compared with, (B, D)."""

    @abstractmethod
    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Score each query with each candidate, without margin and offset: (P, D), (M, D) -> (P, M)."""

    @abstractmethod
    def compare_pairs(self, queries: Tensor, answers: Tensor) -> Tensor:
        """Score each query with its answer, without margin and offset: (P, D), (P, D) -> (P,)."""

    def network(
        self, queries: Tensor, answers: Tensor, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score the answers (P, D) -> (P,), and all candidates (M, D) -> (P, M)."""
        base = self.margin + self.offset
        return self.compare_pairs(queries, answers) + base, self.compare(queries, candidates) + base

    def forward(self, batch: Batch) -> LinkBatch:
        rows = self.embeddings(batch)
        relation = rows["relation"]
        weight = torch.ones(batch.size) if batch.sample_weight is None else batch.sample_weight
        heads, tails, candidates = (
            self.vectors(rows[name]) for name in FEATURES if name != "relation"
        )
        relations, inverse_relations = (
            relation.chunk(2, 1) if self.reciprocal else (relation, relation)
        )
        tail_queries = self.predict_tail(heads, relations)
        predict_head = self.predict_tail if self.reciprocal else self.predict_head
        head_queries = predict_head(tails, inverse_relations)
        penalty = heads.new_zeros(batch.size)
        if self.penalty:
            norms = self.cubic_norms(heads, relations, inverse_relations, tails)
            penalty = self.penalty * norms
        ids = batch.ids["candidate"].values
        return LinkBatch(tail_queries, head_queries, tails, heads, candidates, ids, weight, penalty)

    def entities(self, ids: Tensor) -> Tensor:
        """Return the vectors of entities by id, (n,) -> (n, D), without training them."""
        batch = self.fill_missing_features(
            Batch(len(ids), torch.empty(len(ids), 0), {"head": Ids(ids)})
        )
        return self.vectors(self.embeddings(batch)["head"])

    def embed_entities(self, num_entities: int) -> Tensor:
        """Return the vectors of entities 0 .. E - 1, (E, D)."""
        return torch.cat(
            [self.entities(chunk) for chunk in torch.arange(num_entities).split(CHUNK)]
        )

    def score_entities(self, queries: Tensor, entities: Tensor) -> Tensor:
        """Score each query (P, D) with all entities (E, D), without margin and offset: (P, E), on the CPU."""
        scores = [
            torch.cat([self.compare(query_chunk, chunk) for chunk in entities.split(CHUNK)], 1)
            for query_chunk in queries.split(QUERIES)
        ] or [queries.new_empty(0, len(entities))]
        return torch.cat(scores).cpu()


def compute_link_loss(
    model: KnowledgeGraph, link_batch: LinkBatch, known_answers: KnownAnswers, mesh: Mesh
) -> Tensor:
    """Compute this rank's part of the weighted mean over all ranks' triples. Collective, and its backward too.

    A triple's loss is the mean of `model.loss` over both questions, against all ranks' candidates that are not known
    to be true, plus the penalty of the triple's own vectors.
    """
    candidates = concatenate_over_ranks(mesh, link_batch.candidates)
    ids = concatenate_over_ranks(mesh, link_batch.candidate_ids)
    total = mesh.all_reduce("dense", link_batch.weight.sum(dtype=torch.float64))
    losses = []
    for queries, answers, true in (
        (link_batch.tail_queries, link_batch.tails, known_answers.tails),
        (link_batch.head_queries, link_batch.heads, known_answers.heads),
    ):
        right, wrong = model.evaluate_network(queries, answers, candidates, out_like=queries)
        is_excluded = mark_matching_candidates(true.samples, true.values, len(queries), ids).to(
            wrong.device
        )
        if model.loss == "sigmoid":
            losses.append(binary_triple_loss(right, wrong, is_excluded, model.temperature))
        else:
            assert model.num_entities is not None
            num_wrong = (model.num_entities - true.counts).to(wrong)
            losses.append(
                sampled_softmax_loss(right, wrong, is_excluded, num_wrong, model.temperature)
            )
    triple_losses = (losses[0] + losses[1]) / 2 + link_batch.penalty
    return (triple_losses * link_batch.weight.to(triple_losses)).sum() / max(float(total), 1e-12)


def binary_triple_loss(
    true_scores: Tensor, negative_scores: Tensor, is_excluded: Tensor, temperature: float
) -> Tensor:
    """Compute the loss of classifying triples as true or false (Sun et al. 2019, equations 5 and 6).

    true_scores (P,), negative_scores (P, M); those marked in is_excluded (P, M) do not count. Returns (P,): the mean of
    -log sigmoid(true_scores) and of -log sigmoid(-negative_scores), the latter weighted by the softmax of the negative
    scores.
    """
    weights = (
        (negative_scores.detach() * temperature).masked_fill(is_excluded, float("-inf")).softmax(1)
    )
    weights = weights.nan_to_num()  # rows without a wrong candidate
    return -(logsigmoid(true_scores) + (weights * logsigmoid(-negative_scores)).sum(1)) / 2


def sampled_softmax_loss(
    true_scores: Tensor,
    negative_scores: Tensor,
    is_excluded: Tensor,
    num_negatives: Tensor,
    temperature: float,
) -> Tensor:
    """Compute the loss of finding the answer among all entities by sampled softmax (Bengio and Senecal 2003).

    true_scores (P,), negative_scores (P, M); those marked in is_excluded (P, M) do not count. Returns (P,): -log of the
    answer's share in the softmax over it and all num_negatives (P,) wrong entities. The negative scores are a sample of
    these, and each counts for equally many of them (for links: Ruffinelli et al. 2020).
    """
    num_sampled = (is_excluded.shape[1] - is_excluded.count_nonzero(1)).clamp(min=1)
    log_weight = (num_negatives / num_sampled).log()
    # Each line is one pass over the scores; cross entropy computes the whole softmax in two.
    others = torch.add(log_weight[:, None], negative_scores, alpha=temperature).masked_fill_(
        is_excluded, float("-inf")
    )
    logits = torch.cat([true_scores[:, None] * temperature, others], 1)
    return cross_entropy(logits, torch.zeros_like(num_sampled), reduction="none")


def rank_true_answers(model: KnowledgeGraph, batch: Batch, entities: Tensor) -> Tensor:
    """Rank the true tails, then the true heads, of a batch among all entities (E, D): (2 B,) filtered ranks."""
    links = model(batch)
    known = batch.key
    ranks = []
    for queries, name, answers in (
        (links.tail_queries, "tail", known.tails),
        (links.head_queries, "head", known.heads),
    ):
        scores = model.score_entities(queries, entities)
        ranks.append(compute_filtered_ranks(scores, batch.ids[name].values, answers))
    return torch.cat(ranks)


def compute_filtered_ranks(
    entity_scores: Tensor, true_entities: Tensor, known_entities: Ids
) -> Tensor:
    """Rank each truth among all entities but the others that are known to be true (Bordes et al. 2013).

    entity_scores (B, E), true_entities (B,) -> (B,) float64 ranks, from 1; equal scores share the mean of their ranks.
    Raises NonFiniteError.
    """
    check_scores(entity_scores)
    truth_scores = entity_scores.gather(1, true_entities[:, None])
    # int32: a third of the time of int64.
    above = (entity_scores > truth_scores).sum(1, dtype=torch.int32).double()
    equal = (entity_scores == truth_scores).sum(1, dtype=torch.int32).double() - 1
    sample = known_entities.samples
    is_other = known_entities.values != true_entities[sample]
    sample = sample[is_other]
    other_scores = entity_scores[sample, known_entities.values[is_other]]
    others_above = (other_scores > truth_scores[sample, 0]).double()
    others_equal = (other_scores == truth_scores[sample, 0]).double()
    above -= torch.zeros_like(above).index_add_(0, sample, others_above)
    equal -= torch.zeros_like(equal).index_add_(0, sample, others_equal)
    return above + 1 + equal / 2
