"""Knowledge graphs: vectors of entities and relations, by which a true triple (head, relation, tail) scores high.

TransE (Bordes et al. 2013), DistMult (Yang et al. 2015), ComplEx (Trouillon et al. 2016), RotatE (Sun et al. 2019).
Each makes of a head and a relation the vector that the tail should have, and of a tail and a relation that of the head,
so one comparison of vectors serves both questions and any number of candidates. With `reciprocal` "which head?" asks a
relation of its own, r back, for a tail (Lacroix et al. 2018): a relation's row is then two, side by side.

Legend: B samples, M candidates, P queries, D width of an entity's row; complex vectors are D / 2 pairs side by side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from colonnade.batch import Batch, Ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.models.split import SplitModel
from colonnade.ops.linear import distances, linear, squared_distances
from colonnade.table import Feature, Table

FEATURES = ("head", "relation", "tail", "candidate")
LinkLoss = Literal["sigmoid", "softmax"]


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


class KnowledgeGraph(SplitModel):
    """Scores are `margin` less a distance, or products. Two tables, "entity" and "relation"; features head, tail and
    candidate read entities, candidate is a sequence."""

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
        which the candidates are a sample, so that `margin` cancels (`train.objective.link_loss` has both).
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
        share = self.relation_share * (2 if reciprocal else 1)
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
        return Links(
            toward_tail,
            toward_head,
            tails,
            heads,
            candidates,
            batch.ids["candidate"].values,
            weight,
            penalty,
        )

    def entities(self, ids: Tensor) -> Tensor:
        """(n,) -> (n, D); reads only."""
        size = len(ids)
        none = Ids(torch.empty(0, dtype=torch.int64), torch.zeros(size + 1, dtype=torch.int64))
        zeros = Ids(torch.zeros(size, dtype=torch.int64))
        batch = Batch(
            size,
            torch.empty(size, 0),
            {"head": Ids(ids), "tail": Ids(ids), "relation": zeros, "candidate": none},
        )
        return self.vectors(self.embeddings(batch)["head"])


class Distance(KnowledgeGraph):
    """Scores are less by the distance between what a question leads to and an entity."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        norm: int = 1,
        squared: bool = False,
        margin: float | None = None,
        temperature: float = 1.0,
        loss: LinkLoss = "sigmoid",
        reciprocal: bool = False,
        penalty: float = 0.0,
        seed: int = 0,
    ) -> None:
        """norm: 1, the sum of the absolute differences of an entity's numbers (of complex ones: moduli); 2, the root of
        the sum of their squares, which of many entities is a product of matrices. squared: that sum without the root,
        whose gradient does not fade beside long vectors. Raises ConfigError."""
        super().__init__(
            tables, features, margin=margin, temperature=temperature, loss=loss, reciprocal=reciprocal,
            penalty=penalty, seed=seed,
        )  # fmt: skip
        if norm not in (1, 2):
            raise ConfigError(f"{self.kind}: got norm={norm!r}, wanted 1 or 2")
        if squared and norm == 1:
            raise ConfigError(
                f"{self.kind}: got squared beside norm=1, which has no root to leave out; set norm=2"
            )
        self.norm, self.squared = norm, squared

    @abstractmethod
    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """(P, D) from each of (M, D) -> (P, M) sums of absolute differences."""

    @abstractmethod
    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        """(P, D), (P, D) -> (P,): the diagonal of `differences`."""

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.differences(queries, candidates)
        if self.squared:
            return -squared_distances(queries, candidates)
        return -distances(queries, candidates)

    def compare_one(self, queries: Tensor, answers: Tensor) -> Tensor:
        if self.norm == 1:
            return -self.difference(queries, answers)
        if self.squared:
            return -(queries - answers).square().sum(1)
        return -torch.linalg.vector_norm(queries - answers, dim=1)


class TransE(Distance):
    """-|h + r - t|."""

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head + relation

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail - relation

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return torch.cdist(queries, candidates, p=1.0)

    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries - answers).abs().sum(1)


class DistMult(KnowledgeGraph):
    """sum of h * r * t."""

    start = 0.0

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return head * relation

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail * relation

    def compare(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return linear(queries, candidates, None)

    def compare_one(self, queries: Tensor, answers: Tensor) -> Tensor:
        return (queries * answers).sum(1)


class ComplEx(DistMult):
    """The real part of the sum of h * r * conj(t)."""

    is_complex = True

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _times(head, relation, 1.0)

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _times(tail, relation, -1.0)


class RotatE(Distance):
    """-|h * exp(i r) - t|: a relation turns each of an entity's numbers. A relation's row begins within its
    initializer's scale, which stands for the whole circle: a step of the optimizer turns by that much of it."""

    relation_share = 0.5

    is_complex = True

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        center: float = 0.0,
        norm: int = 1,
        squared: bool = False,
        margin: float | None = None,
        temperature: float = 1.0,
        loss: LinkLoss = "sigmoid",
        reciprocal: bool = False,
        penalty: float = 0.0,
        seed: int = 0,
    ) -> None:
        """center: what an entity's complex numbers are, but for its row, which is added. Above 0 all entities begin
        near one vector, so each relation begins with one of its own, that vector turned, and answers gather around it,
        as they do around TransE's r; without it they must first agree on a middle. Raises ConfigError."""
        super().__init__(
            tables, features, norm=norm, squared=squared, margin=margin, temperature=temperature, loss=loss,
            reciprocal=reciprocal, penalty=penalty, seed=seed,
        )  # fmt: skip
        if not math.isfinite(center):
            raise ConfigError(f"rotate: got center={center}, wanted a finite number")
        self.center = center

    def vectors(self, rows: Tensor) -> Tensor:
        if not self.center:
            return rows
        real, imaginary = rows.chunk(2, 1)
        return torch.cat([real + self.center, imaginary], 1)

    def toward_tail(self, head: Tensor, relation: Tensor) -> Tensor:
        return _times(head, self._turn(relation), 1.0)

    def toward_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return _times(tail, self._turn(relation), -1.0)

    def cubes(self, heads: Tensor, there: Tensor, back: Tensor, tails: Tensor) -> Tensor:
        return self._cubes(heads) + self._cubes(tails)  # a turn's numbers are all of size 1

    def _turn(self, relation: Tensor) -> Tensor:
        angle = relation * (math.pi / self.relation_range)
        return torch.cat([angle.cos(), angle.sin()], 1)

    def differences(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return moduli(queries, candidates)

    def difference(self, queries: Tensor, answers: Tensor) -> Tensor:
        # Its gradient is 0 where the two are equal, as that of `differences`; hypot's would be NaN.
        both = (queries - answers).unflatten(1, (2, -1))
        return torch.linalg.vector_norm(both, dim=1).sum(1)


def moduli(queries: Tensor, candidates: Tensor) -> Tensor:
    """(P, D), (M, D) -> (P, M): sums of the moduli of the differences of D / 2 complex numbers."""
    ours, theirs = (x.unflatten(1, (2, -1)).permute(2, 0, 1) for x in (queries, candidates))
    return torch.cdist(ours, theirs, p=2.0, compute_mode="donot_use_mm_for_euclid_dist").sum(0)


def _times(vectors: Tensor, turns: Tensor, sign: float) -> Tensor:
    """vectors * turns, or (sign -1) times their conjugates; real parts, then imaginary ones."""
    (a, b), (c, d) = vectors.chunk(2, 1), turns.chunk(2, 1)
    d = sign * d
    return torch.cat([a * c - b * d, a * d + b * c], 1)
